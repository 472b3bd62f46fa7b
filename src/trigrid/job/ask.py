"""What `trigrid plan` is asked: a job file as `train` would run it, or a model with layout knobs left open."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from trigrid.errors import Problem, Refused
from trigrid.job.keys import Table
from trigrid.job.resolve import resolve
from trigrid.job.sources import Document, Given, read_document, read_sources
from trigrid.job.writing import plain
from trigrid.plan.layouts import neutral
from trigrid.plan.measured_file import is_calibration
from trigrid.plan.shape import read_size, shape_of_size
from trigrid.plan.space import KNOBS
from trigrid.spec.batch import NOT_GIVEN
from trigrid.spec.gpu import load_gpu
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout
from trigrid.spec.models import resolve_model

TOKENS_OF_A_BATCH = 2**22
"""Of a global batch that is not given."""
LONGEST = 8192
"""Of a sequence that is not given, in tokens, where the model allows it."""
STEPS = 1000
LARGEST_CLUSTER = 10**7


@dataclass(frozen=True)
class Asked:
    """job: sound as it is, with the smallest values of the knobs `open`; gpus: to use at most; assumed: in sentences,
    what was not asked and is taken for granted."""

    job: Job
    open: frozenset[str]
    gpus: int
    assumed: tuple[str, ...]


def ask(
    target: str | None,
    flags: Sequence[str],
    *,
    gpus: int | None = None,
    params: str | None = None,
    cluster: Path | None = None,
    search: bool = False,
    env: Mapping[str, str] = os.environ,
) -> Asked:
    """The plan of `target`, a job file, a model of the catalogue or a config.json; or of `params` parameters.

    flags: values of job keys, as on the command line of `train`. cluster: a TOML file with the keys of [cluster].
    search: in a job file, too, only what flags give is fixed of the layout.
    Raises Refused with every problem found.
    """
    if gpus is not None and not 1 <= gpus <= LARGEST_CLUSTER:
        nearest = min(max(gpus, 1), LARGEST_CLUSTER)
        raise Refused([Problem("gpus", gpus, f"must be from 1 to {LARGEST_CLUSTER:,}", (nearest,))])
    if target is not None and target.endswith(".toml"):
        if params is not None:
            raise Refused([Problem("params", params, f"{target} has a model already")])
        return _of_job(Path(target), flags, gpus, cluster, search, env)
    return _of_model(target, flags, gpus, params, cluster, env)


def _of_job(
    path: Path, flags: Sequence[str], gpus: int | None, cluster: Path | None, search: bool, env: Mapping[str, str]
) -> Asked:
    document = _with_cluster(read_document(path), cluster)
    given = read_sources(document, flags, env)
    if not search:
        job = resolve(given, path.parent, gpus)
        return Asked(job, frozenset(), gpus or job.parallel.world, ())
    fixed = read_sources(Document({}, {(): ""}), flags, env)
    whole = resolve(given, path.parent)
    tree = {**given.tree, "parallel": {**fixed.tree["parallel"]}, "batch": {**given.tree["batch"]}}
    tree["batch"] = {"global_batch": whole.batch.global_batch, "sequence": whole.batch.sequence, **fixed.tree["batch"]}
    for name in ("order", "sequence_parallel"):
        tree["parallel"].setdefault(name, plain(whole.parallel)[name])
    return searched(replace(given, tree=tree), path.parent, gpus or whole.parallel.world, ())


def _of_model(
    target: str | None,
    flags: Sequence[str],
    gpus: int | None,
    params: str | None,
    cluster: Path | None,
    env: Mapping[str, str],
) -> Asked:
    if (target is None) == (params is None):
        reason = "a model of the catalogue, a config.json or a job file is needed, or --params with a size"
        raise Refused([Problem("MODEL", target or NOT_GIVEN, reason)])
    spec = shape_of_size(read_size(params, "params")) if params else resolve_model(target or "")
    document = _with_cluster(Document({"model": plain(spec)}, {(): ""}), cluster)
    given = read_sources(document, flags, env)
    assumed = fill_in(given.tree, spec.context)
    return searched(given, Path(), gpus, tuple(assumed))


def _with_cluster(document: Document, path: Path | None) -> Document:
    """`document` with the keys of the cluster file `path`."""
    if path is None:
        return document
    try:
        other = read_document(path)
    except Refused as refused:
        # It is read as a job file, of which it has one table.
        empty = "the file is empty; keys of [cluster] are needed, such as gpu and gpus_per_node"
        told = [replace(p, reason=empty) if "file is empty" in p.reason else p for p in refused.problems]
        raise Refused([replace(p, key="cluster" if p.key == "job" else p.key) for p in told]) from refused
    table = other.table.get("cluster", other.table)
    if is_calibration(other.table):
        # Measurements complete what a job says of its cluster; they do not replace it.
        table = {**document.table.get("cluster", {}), **other.table.get("cluster", {}), "calibration": str(path)}
    places = {("cluster", *key): place for key, place in other.places.items() if key[:1] != ("cluster",)}
    places |= {key: place for key, place in other.places.items() if key[:1] == ("cluster",)}
    return Document({**document.table, "cluster": table}, {**document.places, **places})


def fill_in(tree: Table, context: int) -> list[str]:
    """Fills in what a plan of a model needs and its flags leave out; tells what."""
    batch, cluster, found = tree["batch"], tree["cluster"], []
    tree["run"].setdefault("steps", STEPS)
    if "sequence" not in batch:
        batch["sequence"] = min(context, LONGEST)
        found.append(f"sequence of {batch['sequence']:,} tokens (--seq)")
    if not batch.keys() & {"global_batch", "accumulation"} and isinstance(batch["sequence"], int):
        batch["global_batch"] = max(1, TOKENS_OF_A_BATCH // max(1, batch["sequence"]))
        found.append(f"global batch of {batch['global_batch']:,} sequences, about 4 million tokens (--global-batch)")
    if "gpus_per_node" not in cluster:
        # Whoever names an accelerator means the server that it comes in.
        name = cluster.get("gpu", "h100")
        cluster["gpus_per_node"] = load_gpu(name).nvlink_domain if isinstance(name, str) else 8
    return found


def searched(given: Given, folder: Path, gpus: int | None, assumed: tuple[str, ...]) -> Asked:
    """What is asked where every knob that no source gives is open. Raises Refused with every problem found."""
    tree = given.tree
    if "accumulation" in tree["batch"]:
        reason = "follows from batch.global_batch, parallel.dp and batch.micro_batch where these are searched"
        value = tree["batch"].pop("accumulation")
        raise Refused([Problem("batch.accumulation", value, reason, where=given.place("batch.accumulation"))])
    stated = {*tree["parallel"], *tree["batch"]}
    opened = {knob for knob in KNOBS if knob not in stated}
    if "zero" in stated:
        # A stage stands for its policies, unless these are given.
        opened -= {"gather", "reduce"}
    if {"tp", "pp"} <= stated:
        # Whoever gives both means the rest to be data parallel.
        opened -= {"cp"}
    if not tree["model"].get("experts"):
        opened -= {"ep"}
    base = {field.name: tree["parallel"].get(field.name, getattr(Layout(), field.name)) for field in fields(Layout)}
    if all(isinstance(base[name], int) for name in ("virtual_stages", "dp_replicate", "ep")):
        found: dict[str, Any] = plain(neutral(Layout(**base), frozenset(stated)))
        tree["parallel"] |= {name: value for name, value in found.items() if name not in stated}
    tree["batch"].setdefault("micro_batch", 1)
    job = resolve(given, folder)
    degrees = {"tp", "pp", "cp", "dp"}
    world = job.parallel.world
    if gpus is None:
        if opened & degrees - {"cp"}:
            named = ", ".join(f"parallel.{name}" for name in ("tp", "pp", "dp") if name in opened)
            raise Refused([Problem("gpus", NOT_GIVEN, f"--gpus is needed where {named} is left open")])
        opened -= degrees
        gpus = world
    if world > gpus:
        layout = job.parallel
        product = f"tp · pp · cp · dp = {layout.tp} · {layout.pp} · {layout.cp} · {layout.dp} = {world}"
        raise Refused([Problem("gpus", gpus, f"{product} must not exceed it", (world,))])
    return Asked(job, frozenset(opened), gpus, assumed)
