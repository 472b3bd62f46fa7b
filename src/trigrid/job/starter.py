"""A commented job to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from trigrid.job.keys import JobKey, Key, Table, choices, job_keys, key_names, table_of
from trigrid.job.resolve import resolve
from trigrid.job.sources import Document, read_sources
from trigrid.job.writing import one_line
from trigrid.spec.job import Job

# Minutes on one process without a GPU.
TINY: Table = {
    "model": {
        "name": "tiny",
        "hidden": 192,
        "layers": 4,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 32,
        "ffn": 512,
        "vocab": 4096,
        "context": 256,
    },
    "batch": {"sequence": 128},
    "run": {"steps": 50, "precision": "fp32"},
    "optimizer": {"lr": 1e-3},
}
OF_A_NAME: Table = {"batch": {"sequence": 1024}, "run": {"steps": 50}}
HEAD = """\
A job of trigrid: `trigrid train THIS_FILE` runs it, `trigrid train THIS_FILE --dry-run` checks it.
A line such as `#key = value` states a default: take the `#` away to change it."""
WIDTH = 100


def starter(overrides: Sequence[str], env: Mapping[str, str], folder: Path = Path()) -> str:
    """The text of a job file that explains every key: those that `overrides` (arguments of a command line) and `env`
    give, those that a first run needs, and the defaults of all others, commented out.

    The model is a tiny one that trains anywhere, unless `model.name` or `model.config` is given; the path of the latter
    starts from `folder`, where the file will lie. Raises Refused where what is given makes no job.
    """
    given = read_sources(Document({}, {(): "trigrid init"}), overrides, env)
    tree = given.tree
    is_named = bool(tree["model"].keys() & {"name", "config"})
    for section, keys in (OF_A_NAME if is_named else TINY).items():
        tree[section] = {**keys, **tree[section]}
    if not tree["batch"].keys() & {"global_batch", "micro_batch", "accumulation"}:
        tree["batch"]["micro_batch"] = 4
    if not tree["batch"].keys() & {"global_batch", "accumulation"}:
        tree["batch"]["accumulation"] = 4
    stated = set(key_names(tree))
    config = tree["model"].get("config")
    return "\n".join(_lines(resolve(given, folder), stated, config, is_named)) + "\n"


def _lines(job: Job, stated: set[str], config: object, is_named: bool) -> Iterator[str]:
    yield from _comment(HEAD)
    computed = {"model.config": config, "batch.accumulation": job.batch.microbatches(job.parallel)}
    for key in job_keys():
        name = ".".join(key.key[1:])
        value = computed[key.dotted] if key.dotted in computed else _value(job, key.key)
        if not name:
            yield from ("", *_comment(key.meaning), f"[{key.dotted}]")
        elif key.key[0] == "model" and is_named and key.dotted not in stated:
            continue
        elif value is None or table_of(key.type):
            yield from _comment(f"{name}: {key.meaning}")
        else:
            is_default = value == key.default and key.dotted not in stated
            yield from _comment(key.meaning + _choices(key))
            yield f"{'#' if is_default or key.dotted == 'batch.accumulation' else ''}{name} = {one_line(value)}"


def _value(job: Job, key: Key) -> Any:
    """What `job` holds under `key`; None below a table that it does not have."""
    found: Any = job
    for name in key:
        found = getattr(found, name, None)
    return found


def _choices(key: JobKey) -> str:
    legal = ", ".join(map(one_line, choices(key.type)))
    return f" {'Any' if isinstance(key.default, tuple) else 'One'} of {legal}." if legal else ""


def _comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield from (f"# {part}" for part in wrap(line, WIDTH))
