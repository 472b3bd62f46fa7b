"""`trigrid compare`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trigrid.cli.app import Json, Quiet, app, examples, print_json, run_folder

if TYPE_CHECKING:
    from trigrid.report.compare import Traced
    from trigrid.report.console import Console
    from trigrid.report.timelines import Comparison
    from trigrid.spec.job import Job

PAGE_COLUMNS = 100


@app.command(
    help_epilogue=examples(
        "trigrid compare runs/tiny-3d-20261130-204043",
        "trigrid compare runs/tiny-3d-20261130-204043 --calibration cluster.toml",
        "trigrid compare runs/tiny-3d-20261130-204043 --prove --json",
    )
)
def compare(
    run: Annotated[Path, Parameter(help="The folder of a run: over, failed or under way.")],
    *,
    calibration: Annotated[
        Path | None, Parameter(help="Plan with this file of `trigrid calibrate` in place of the job's, if it has one.")
    ] = None,
    prove: Annotated[
        bool, Parameter(negative="", help="Trace the program as `trigrid prove` does, for a third column of memory.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Lay a run beside its plan: memory and time by category, traffic, tokens/s and MFU, and the largest gap in words.

    The plan is that of the run's own job. Where the run has recorded the timeline of a step (`trigrid train --trace`),
    it is laid beside the planned one as well.
    """
    from trigrid.report.compare import compare_run
    from trigrid.report.compare_text import compare_json, compare_text
    from trigrid.report.console import Console
    from trigrid.report.measured import read_run
    from trigrid.report.timelines import comparison_json, comparison_text

    run_folder(run, "compare")
    console = Console(quiet)
    with console.waiting("reading the run and making its plan"):
        measured = read_run(run, time.time())
    traced = _traced(measured.job, console) if prove else ()
    found = compare_run(measured, str(calibration) if calibration else "", traced)
    timelines = _timelines(found.plan.job if found.plan else None, run, console)
    if as_json:
        told = compare_json(found)
        print_json({**told, "timelines": comparison_json(timelines) if timelines else None})
        return
    print(compare_text(found))
    if timelines:
        print(f"\n{comparison_text(timelines, shutil.get_terminal_size((PAGE_COLUMNS, 24)).columns)}")


def _timelines(job: Job | None, run: Path, console: Console) -> Comparison | None:
    """The timeline that the run has recorded beside the planned one, where it has recorded one of this job."""
    from trigrid.errors import Refused
    from trigrid.plan.simulate import simulate
    from trigrid.report.timelines import compare as lay_beside
    from trigrid.schedule.recorded import NAME

    if job is None or not (run / NAME).exists():
        return None
    try:
        return lay_beside(simulate(job), run)
    except Refused as refused:
        console.warn(f"its recorded timeline is left out: {refused}")
        return None


def _traced(job: Job, console: Console) -> Sequence[Traced]:
    from trigrid.check.prove import prove
    from trigrid.check.roles import roles
    from trigrid.report.compare import Traced

    chosen = roles(job)
    with console.waiting("running the program"):
        proofs = prove(job, chosen, console.say)
    kept = ("activations", "weight queue", "logits", "messages")
    return [
        Traced(
            stages=role.alike,
            state={line.name: line.traced for line in proof.state},
            peak={line.name: line.traced for line in proof.peak.memory},
            peak_bytes=proof.peak.total.traced,
            kept_bytes=max(sum(sample.left[name] for name in kept) for sample in proof.samples),
        )
        for role, proof in zip(chosen, proofs, strict=True)
    ]
