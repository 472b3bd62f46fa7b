"""From what the user gave to a checked job: the model's base, types, the world, the rules."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from trigrid.blueprint.frozen import check_frozen
from trigrid.errors import Problem, Refused
from trigrid.job.building import NEEDED, build
from trigrid.job.keys import Key, Table
from trigrid.job.sources import Given, parse_document, read_document, read_sources, shown
from trigrid.job.writing import plain
from trigrid.spec.batch import NOT_GIVEN, BatchNumbers, solve_batch
from trigrid.spec.huggingface import model_from_config
from trigrid.spec.job import Job
from trigrid.spec.model import ModelSpec
from trigrid.spec.models import load_model
from trigrid.spec.rules import check, check_value

BATCH_KEYS = {"batch.global_batch", "batch.micro_batch", "batch.accumulation", "parallel.dp", "world"}


def load_job(
    path: str | Path,
    overrides: Sequence[str] = (),
    world: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> Job:
    """The job of `path` with `env` and `overrides` (arguments of a command line) on top, checked by every rule.

    `[model]` is a `name` of the catalogue or a Hugging Face `config = "config.json"` (sought from the job file's
    folder), either with single fields replaced; or a table of every field without a default, which stands alone
    whatever its name. What `[batch]` and dp leave out follows from the batch equation. world: number of ranks, where it
    is known: then a dp that no source gives follows from it.
    Raises Refused with every problem found.
    """
    return resolve(read_sources(read_document(Path(path)), overrides, env), Path(path).parent, world)


def job_from_text(text: str, overrides: Sequence[str] = (), folder: Path = Path()) -> Job:
    """The job that `text`, as a file of `folder`, describes, with `overrides` on top. Raises Refused as `load_job`."""
    return resolve(read_sources(parse_document(text, "job"), overrides, {}), folder)


def resolve(given: Given, folder: Path, world: int | None = None) -> Job:
    """The job that all sources together describe, checked by every rule; see `load_job`."""
    problems, tree, has_base = list(given.problems), given.tree, True
    fixed = {name for table in ("batch", "parallel") for name in tree[table]}
    try:
        tree["model"] = _with_base(tree["model"], folder)
    except Refused as refused:
        problems += refused.problems
        has_base = False
    accumulation = _take_accumulation(tree["batch"], problems)
    job = _validate(tree, has_base, problems)
    if job:
        job = _fit_world(job, world, "dp" in fixed, problems)
        job = _fit_batch(job, fixed if world is None else fixed | {"dp"}, accumulation, problems)
        problems += check(job) or check_frozen(job)
    if job and not problems:
        return job
    # The world is given by who starts the ranks, not by a source of the job.
    raise Refused([p if p.where or p.key == "world" else replace(p, where=given.place(p.key)) for p in problems])


def _with_base(model: Table, folder: Path) -> Table:
    """`model` on top of the one that it names, unless it stands alone. Raises Refused where there is no such model."""
    given = {name: value for name, value in model.items() if name != "config"}
    missing = [f.name for f in fields(ModelSpec) if f.default is MISSING and f.name not in given]
    own = f"a model of your own also needs {', '.join(missing)}"
    if "config" in model:
        base = _base_of_config(model["config"], folder)
    elif not missing:
        return given
    elif isinstance(name := given.get("name"), str):
        base = _base_of_name(name, own if len(given) > 1 else "")
    else:
        value = given.get("name", NOT_GIVEN)
        raise Refused([Problem("model.name", value, f"a name of the catalogue or model.config is needed; {own}")])
    merged = plain(base)
    for name, value in given.items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def _base_of_config(config: object, folder: Path) -> ModelSpec:
    if not isinstance(config, str):
        raise Refused([Problem("model.config", config, "a string is needed")])
    try:
        return model_from_config(folder / config)
    except Refused as refused:
        raise Refused([replace(p, key=f"model.config: {p.key}") for p in refused.problems]) from refused


def _base_of_name(name: str, otherwise: str) -> ModelSpec:
    try:
        return load_model(name)
    except Refused as refused:
        reasons = [(p, "; ".join(filter(None, (p.reason, otherwise)))) for p in refused.problems]
        raise Refused([replace(p, key="model.name", reason=reason) for p, reason in reasons]) from refused


def _validate(tree: Table, has_base: bool, problems: list[Problem]) -> Job | None:
    """The job that `tree` describes, or None after adding to `problems` what is missing or of the wrong type."""
    refused = {p.key for p in problems}

    def report(key: Key, reason: str) -> None:
        missing, dotted = reason == NEEDED[MISSING], ".".join(key)
        if missing and (dotted in refused or (key[0] == "model" and not has_base)):
            return
        value: Any = NOT_GIVEN if missing else tree
        for name in () if missing else key:
            value = value[name]
        problems.append(Problem(dotted, shown(value), reason))

    job: Job | None = build(Job, tree, report)
    return job


def _fit_world(job: Job, world: int | None, dp_given: bool, problems: list[Problem]) -> Job:
    """`job` with the dp that fills `world` ranks where none is given; adds to `problems` where the ranks do not fit."""
    layout = job.parallel
    if world is None or min(layout.tp, layout.pp, layout.cp, layout.dp) < 1:
        return job
    others = layout.tp * layout.pp * layout.cp
    dp, left = divmod(world, others)
    equation = f"world = tp · pp · cp · dp = {layout.tp} · {layout.pp} · {layout.cp}"
    if not dp_given and dp and not left:
        return replace(job, parallel=replace(layout, dp=dp))
    if not dp_given:
        legal = tuple(n for n in (dp * others, (dp + 1) * others) if n)
        problems.append(Problem("world", world, f"{equation} · dp must hold for a whole dp", legal))
        # The smallest dp that the layout allows, so that no rule refuses what only the missing dp broke.
        return replace(job, parallel=replace(layout, dp=max(1, layout.dp_replicate)))
    if layout.world != world:
        held = f"{equation} · {layout.dp} = {layout.world}"
        if dp and not left:
            problems.append(Problem("parallel.dp", layout.dp, f"{held}, but there are {world} ranks", (dp,)))
        else:
            problems.append(Problem("world", world, f"{held} must hold", (layout.world,)))
    return job


def _take_accumulation(batch: Table, problems: list[Problem]) -> int | None:
    """`batch.accumulation`, out of the table, since a job holds `global_batch` instead; None where it is refused.

    Without either there is no batch at all; a global batch of 1 then stands in for what the equation may give.
    """
    value = batch.pop("accumulation", None)
    faults = []
    if value is not None and type(value) is not int:
        faults = [Problem("batch.accumulation", shown(value), NEEDED[int])]
    elif value is not None:
        faults = check_value("batch.accumulation", value)
    elif "global_batch" not in batch and not {"batch.global_batch", "batch.accumulation"} & {p.key for p in problems}:
        lacking = solve_batch()
        assert isinstance(lacking, Problem)
        faults = [lacking]
    problems += faults
    batch.setdefault("global_batch", 1)
    return None if faults else value


def _fit_batch(job: Job, fixed: set[str], accumulation: int | None, problems: list[Problem]) -> Job:
    """`job` with what the batch equation makes of the numbers not `fixed`; adds to `problems` where it cannot hold."""
    batch, layout = job.batch, job.parallel
    numbers = {"global_batch": batch.global_batch, "micro_batch": batch.micro_batch, "dp": layout.dp}
    known = {name: number for name, number in numbers.items() if name in fixed}
    if min(known.values(), default=1) < 1:
        return job
    told = any(p.key in BATCH_KEYS for p in problems)
    solved = solve_batch(**known, accumulation=accumulation) if not told else None
    if isinstance(solved, BatchNumbers):
        dp, micro_batch, global_batch = solved.dp, solved.micro_batch, solved.global_batch
    else:
        problems += [solved] if solved else []
        # Numbers that let the equation hold, so that no rule refuses what only this broke.
        dp, micro_batch = layout.dp if "dp" in fixed else max(1, layout.dp_replicate), batch.micro_batch
        global_batch = dp * micro_batch
    batch = replace(batch, global_batch=global_batch, micro_batch=micro_batch)
    return replace(job, batch=batch, parallel=replace(layout, dp=dp))
