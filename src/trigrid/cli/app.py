"""The application, and what its commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

import trigrid
from trigrid.errors import Problem, Refused

if TYPE_CHECKING:
    from trigrid.spec.job import Job

app = App(
    name="trigrid",
    version=trigrid.__version__,
    help="Plan, prove and run 3D-parallel training of large language models.",
    help_epilogue="Each command shows examples: trigrid COMMAND --help",
    # Rendering markdown would take as long to load as everything else.
    help_format="plaintext",
    version_format="plaintext",
    suppress_keyboard_interrupt=False,
)
app.register_install_completion_command(help="Install completion for this shell.")

JobFile = Annotated[Path, Parameter(help="The job, a TOML file.")]
Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True, help="Values that replace those of the file: `--parallel.tp 4`, or short `--tp 4`."
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, Parameter(negative="", help="Say nothing along the way but warnings and errors.")]


def examples(*lines: str) -> str:
    """What a command's help ends with."""
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def trainable(path: Path, overrides: Sequence[str], world: int | None = None) -> Job:
    """The job of `path`, if the engine can run it."""
    from trigrid.job import load_job
    from trigrid.plan.scheduled import check_schedule
    from trigrid.spec.rules import check_trainable

    job = load_job(path, overrides, world=world)
    if problems := check_trainable(job):
        raise Refused(problems)
    # Here, before any process starts and any data is prepared.
    check_schedule(job)
    return job


def searched_job(arguments: Sequence[str], gpus: int | None) -> Job:
    """The job that is asked for, a file or a model and flags; what is left open of its layout is searched, as
    `trigrid plan` does."""
    from trigrid.job.ask import ask
    from trigrid.plan.auto import auto_job, named_job
    from trigrid.plan.search import search_layouts

    given = [*arguments]
    target = given.pop(0) if given and not given[0].startswith("--") else None
    asked = ask(target, given, gpus=gpus)
    if not asked.open:
        return asked.job
    made = asked.job.parallel.schedule == "auto"
    found = search_layouts(named_job(asked.job) if made else asked.job, open=asked.open, gpus=asked.gpus)
    if found is None:
        reason = f"no layout of {asked.gpus:,} GPUs goes with the global batch and the degrees given"
        raise Refused([Problem("gpus", asked.gpus, reason)])
    return auto_job(found.job) if made else found.job


def run_folder(folder: Path, key: str, nor: str = "") -> None:
    """Raises Refused where `folder` is not that of a run, with the newest ones in it; nor: what it is not either."""
    if not folder.is_dir():
        reason = f"is no folder of a run{nor}" if folder.exists() else "there is no such folder"
        raise Refused([Problem(key, folder, reason, _runs_in(folder.parent))])
    if not (folder / "job.toml").exists():
        raise Refused([Problem(key, folder, "is no folder of a run: it has no job.toml", _runs_in(folder))])


def _runs_in(folder: Path) -> tuple[str, ...]:
    runs = [file.parent for file in folder.glob("*/events.jsonl")] if folder.is_dir() else []
    return tuple(map(str, sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True)[:3]))


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))
