"""The application, and what its commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

import trigrid
from trigrid.errors import Refused

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


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))
