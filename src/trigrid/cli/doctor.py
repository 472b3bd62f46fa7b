"""`trigrid doctor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trigrid.cli.app import Json, Overrides, Quiet, app, examples, print_json
from trigrid.launch.place import RUN_DIR_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trigrid.report.console import Console
    from trigrid.report.doctor import Examination
    from trigrid.spec.job import Job

ANSWER = "doctor.json"
LONGEST_S = 600.0


@app.command(
    help_epilogue=examples(
        "trigrid doctor",
        "trigrid doctor examples/tiny-3d.toml",
        "torchrun --nproc-per-node 8 -m trigrid doctor job.toml",
        "srun python -m trigrid doctor job.toml --json",
    )
)
def doctor(
    job: Annotated[Path | None, Parameter(help="The job that is to run here: its grid, its folder, its GPU.")] = None,
    *overrides: Overrides,
    seconds: Annotated[float, Parameter(help="What to take, about; where that is too little, some is left out.")] = 40,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Look over this machine or cluster before a run, and say what is wrong and what to do about it.

    Versions, GPUs and their clocks, NICs, NVLink, limits, disk; under torchrun or srun also every collective of the
    job's grid beside what is planned for it, messages in pairs, products, and clocks. Without a launcher it starts the
    ranks of the job on this machine. Exit code 1 where something is wrong.
    """
    from trigrid.errors import Problem, Refused
    from trigrid.job import load_job
    from trigrid.launch.place import find_place
    from trigrid.report.console import Console

    if not 0 < seconds <= LONGEST_S:
        raise Refused([Problem("--seconds", seconds, f"must be above 0, and at most {LONGEST_S:g}", (40,))])
    place = find_place(os.environ)
    loaded = load_job(job, overrides, world=place.world if place else None) if job else None
    if job is None and overrides:
        raise Refused([Problem("doctor", overrides[0], "values of a job need a job file")])
    if place and loaded and loaded.parallel.world != place.world:
        reason = f"{place.world} ranks were started"
        raise Refused([Problem("world", loaded.parallel.world, reason, (place.world,))])
    first = place is None or place.rank == 0
    console = Console(quiet or not first)
    if place is None and loaded and loaded.parallel.world > 1:
        found = _start(job, overrides, loaded, seconds, console)
    else:
        from trigrid.check.doctor import Order, examine
        from trigrid.train import stopping

        # Who starts ranks holds back signals until there are handlers; here they end the process.
        stopping.let_through()
        answer = examine(Order(loaded, seconds), place, console)
        if isinstance(answer, bool):
            sys.exit(0 if answer or RUN_DIR_VARIABLE in os.environ else 1)
        found = answer
    if RUN_DIR_VARIABLE in os.environ:
        _leave(Path(os.environ[RUN_DIR_VARIABLE]), found)
        return
    _tell(found, as_json)


def _tell(found: Examination, as_json: bool) -> None:
    from trigrid.report.doctor import as_json as json_of
    from trigrid.report.doctor import print_table

    if as_json:
        print_json(json_of(found))
    else:
        print_table(found, sys.stdout, None if sys.stdout.isatty() else 120)
    if found.wrong:
        sys.exit(1)


def _start(job: Path | None, overrides: Sequence[str], loaded: Job, seconds: float, console: Console) -> Examination:
    """As all ranks of the job on this machine; the first of them leaves what was found."""
    import json
    from tempfile import TemporaryDirectory

    from trigrid.report.doctor import Examination, Finding
    from trigrid.train import local

    local.check_room(loaded)
    console.say(f"starting {loaded.parallel.world} processes on this machine")
    with TemporaryDirectory(prefix="trigrid-doctor-") as folder:
        flags = ["--seconds", str(seconds), *(["--quiet"] if console.quiet else [])]
        local.run_local(loaded, ("doctor", str(job), *overrides, *flags), Path(folder), console, 0)
        values = json.loads(Path(folder, ANSWER).read_text(encoding="utf-8"))
    findings = tuple(Finding(**{**finding, "where": tuple(finding["where"])}) for finding in values["findings"])
    return Examination(values["world"], tuple(values["hosts"]), findings, tuple(values["sampled"]), values["seconds"])


def _leave(folder: Path, found: Examination) -> None:
    """Where the process that started the ranks reads it."""
    import json

    from trigrid.report.doctor import as_json as json_of

    (folder / ANSWER).write_text(json.dumps(json_of(found)), encoding="utf-8")
