"""`trigrid status`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trigrid.cli.app import Json, app, examples, print_json, run_folder


@app.command(
    help_epilogue=examples(
        "trigrid status runs/tiny-3d-20261130-204043",
        "trigrid status runs/tiny-3d-20261130-204043 --follow",
        "trigrid status runs/tiny-3d-20261130-204043 --json",
    )
)
def status(
    run_dir: Annotated[Path, Parameter(help="The folder of a run, under way or over.")],
    *,
    follow: Annotated[
        bool, Parameter(negative="", help="Tell of each change until the run is over; with --json a line for each.")
    ] = False,
    every: Annotated[float, Parameter(help="Seconds between two looks.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Tell how a run stands: its state, step, loss, rates, time left, checkpoint, restarts, and which rank failed.

    It reads the run's files alone, so it may run anywhere that sees them. Exit code 1 where the run has failed, hangs,
    or has been silent for longer than it should be.
    """
    from trigrid.errors import Problem, Refused
    from trigrid.job import load_job
    from trigrid.report.status import FAILING, status_of, status_text
    from trigrid.report.status import as_json as json_of
    from trigrid.report.status import follow as changes

    run_folder(run_dir, "status")
    if not 0.1 <= every <= 3600:
        raise Refused([Problem("--every", every, "must be from 0.1 to 3600 seconds", (2.0,))])
    job = load_job(run_dir / "job.toml", env={})
    found = None if follow else status_of(run_dir, job, time.time())
    if follow:
        for found in changes(run_dir, job, every):
            print(json.dumps(json_of(found), allow_nan=False) if as_json else status_text(found), flush=True)
    elif found is None:
        reason = "has no events (events.jsonl): it has not started"
        raise Refused([Problem("status", run_dir, reason)])
    elif as_json:
        print_json(json_of(found))
    else:
        print(status_text(found))
    if found is not None and found.state in FAILING:
        sys.exit(1)
