"""`trigrid train`."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trigrid.cli.app import JobFile, Json, Overrides, Quiet, app, examples, print_json, trainable
from trigrid.launch.place import RUN_DIR_VARIABLE


@app.command(
    help_epilogue=examples(
        "trigrid train examples/tiny-3d.toml",
        "trigrid train examples/tiny-3d.toml --tp 4 --pp 1 --steps 20",
        "trigrid train examples/tiny-3d.toml --dry-run",
        "trigrid train examples/tiny-3d.toml --resume latest --tp 1",
        "torchrun --nproc-per-node 8 -m trigrid train examples/tiny-3d.toml",
    )
)
def train(
    job: JobFile,
    *overrides: Overrides,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Print the resolved job and the grid, start nothing.")
    ] = False,
    ignore_plan: Annotated[
        bool, Parameter(negative="", help="Start on GPUs also where the plan says that the job does not fit.")
    ] = False,
    resume: Annotated[
        str | None,
        Parameter(
            help='Go on with a run: "latest" (the newest of this job that has a checkpoint, else a new one), the '
            "folder of a run, or a checkpoint."
        ),
    ] = None,
    max_restarts: Annotated[
        int, Parameter(help="Times that all ranks start again after a failure, from the last complete checkpoint.")
    ] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a job on this machine, or as a rank of a launcher that started this process.

    Started by hand it runs torchrun for all ranks of the layout. Under torchrun or srun it joins as one of their ranks.
    """
    from trigrid.errors import Problem, Refused
    from trigrid.grid import golden_rules, grid_of
    from trigrid.job import dump_job
    from trigrid.launch.place import find_place
    from trigrid.report.console import Console
    from trigrid.report.metrics import Summary, describe
    from trigrid.spec.rules import warnings

    console = Console(quiet)
    place = find_place(os.environ)
    resolved = trainable(job, overrides, place.world if place else None)
    grid = grid_of(resolved)
    first = place is None or place.rank == 0
    if first and RUN_DIR_VARIABLE not in os.environ:
        for warning in [*warnings(resolved), *golden_rules(grid)]:
            console.warn(str(warning))
    if dry_run:
        if not first:
            return
        if as_json:
            print_json({"job": asdict(resolved), "groups": {a: grid.groups(a) for a in ("tp", "pp", "zero", "dp")}})
        else:
            print(f"{dump_job(resolved)}\n# the grid: {grid.world} ranks\n{_commented(grid.picture())}")
        return

    from trigrid.train import local, trainer
    from trigrid.train.fit import check_plan
    from trigrid.train.opening import open_run

    if first and RUN_DIR_VARIABLE not in os.environ:
        check_plan(resolved, console, ignore_plan)
    elsewhere = place is not None and RUN_DIR_VARIABLE not in os.environ
    if max_restarts < 0 or (max_restarts and elsewhere):
        reason = "the launcher that started this process has its own" if elsewhere else "must be 0 or more"
        raise Refused([Problem("--max-restarts", max_restarts, reason, (0,))])
    if place is None and (resolved.parallel.world > 1 or max_restarts):
        local.check_room(resolved)
        run_dir = open_run(resolved, job.stem, resume, console).run_dir
        console.say(f"starting {resolved.parallel.world} processes on this machine")
        flags = [flag for flag, given in (("--json", as_json), ("--quiet", quiet)) if given]
        flags += ["--resume", resume] if resume else []
        local.run_local(resolved, ("train", str(job), *overrides, *flags), run_dir, console, max_restarts)
        return
    summary = trainer.run_rank(resolved, job.stem, place, resume, console)
    if summary is not None:
        if as_json:
            print_json(asdict(summary))
        elif isinstance(summary, Summary):
            print(describe(summary))
            _beside(summary.run_dir)


def _beside(run_dir: str) -> None:
    """Tell how the run compares with its plan."""
    from trigrid.report.compare import compare_run
    from trigrid.report.compare_text import short_text
    from trigrid.report.measured import read_run

    print(short_text(compare_run(read_run(Path(run_dir), time.time()))))


def _commented(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines())
