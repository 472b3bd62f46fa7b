"""`trigrid report`."""

from __future__ import annotations

import time
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trigrid.cli.app import Json, Overrides, Quiet, app, examples, print_json, run_folder

if TYPE_CHECKING:
    from trigrid.report.console import Console
    from trigrid.report.prospect import Known

MOST_DAYS, MOST_RUNS = 10_000.0, 10_000


@app.command(
    help_epilogue=examples(
        "trigrid report runs/tiny-3d-20261130-204043",
        "trigrid report runs/tiny-3d-20261130-204043 --json",
        "trigrid report examples/llama3-405b.toml",
        "trigrid report examples/llama3-405b.toml --days 90 --mtbf-hours 6",
    )
)
def report(
    target: Annotated[Path, Parameter(help="The folder of a run, also of one that is under way; or a job file.")],
    *overrides: Overrides,
    days: Annotated[float | None, Parameter(help="Days that runs of a job are played for; 54, as Llama 3's.")] = None,
    runs: Annotated[int, Parameter(help="Runs of a job to play.")] = 100,
    seed: Annotated[int, Parameter(help="Seed of their failures.")] = 0,
    shape: Annotated[
        float, Parameter(help="Of the Weibull law of their failures; below 1 they come in clusters.")
    ] = 1.0,
    mtbf_hours: Annotated[
        float | None, Parameter(help="Mean hours between failures of the whole job; by default Llama 3's rate.")
    ] = None,
    restart_s: Annotated[
        float | None, Parameter(help="Seconds from a failure that is known to training again.")
    ] = None,
    detect_s: Annotated[float | None, Parameter(help="Seconds from a failure until it is known.")] = None,
    write_gb_s: Annotated[float | None, Parameter(help="GB/s that a node writes to shared storage.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tell where a run's time went, by cause, beside what was to be expected; or what a job has to expect.

    Of a run: time that counts and time that was lost, each failure, the best checkpoint interval. Of a job file: the
    same expectation, and long runs with failures played.
    """
    from trigrid.errors import Problem, Refused
    from trigrid.plan.goodput import LLAMA3_DAYS
    from trigrid.report.console import Console
    from trigrid.report.prospect import Known

    given = {"mtbf-hours": mtbf_hours, "write-gb-s": write_gb_s, "shape": shape, "days": days}
    problems = [
        Problem(name, value, "must be a number above 0")
        for name, value in given.items()
        if value is not None and not (isfinite(value) and value > 0)
    ]
    problems += [
        Problem(name, value, "must be 0 or more")
        for name, value in {"restart-s": restart_s, "detect-s": detect_s}.items()
        if value is not None and not (isfinite(value) and value >= 0)
    ]
    if days is not None and days > MOST_DAYS:
        problems.append(Problem("days", days, f"must be {MOST_DAYS:,.0f} at most", (MOST_DAYS,)))
    if not 0.2 <= shape <= 10:
        problems.append(Problem("shape", shape, "must be from 0.2 to 10", (min(max(shape, 0.2), 10.0),)))
    if not 1 <= runs <= MOST_RUNS:
        problems.append(Problem("runs", runs, f"must be from 1 to {MOST_RUNS:,}", (min(max(runs, 1), MOST_RUNS),)))
    is_job = target.suffix == ".toml" and not target.is_dir()
    if not is_job and (overrides or days is not None):
        problems.append(
            Problem("report", target, "a run is reported as it was: --days and values of a job need a job file")
        )
    if problems:
        raise Refused(problems)
    known = Known(
        mtbf_s=mtbf_hours * 3600 if mtbf_hours else None,
        restart_s=restart_s,
        detect_s=detect_s,
        node_write_Bps=write_gb_s * 1e9 if write_gb_s else None,
    )
    if is_job:
        _job(
            target, overrides, LLAMA3_DAYS if days is None else days, runs, seed, shape, known, as_json, Console(quiet)
        )
    else:
        _run(target, known, as_json, Console(quiet))


def _run(folder: Path, known: Known, as_json: bool, console: Console) -> None:
    from trigrid.errors import Problem, Refused
    from trigrid.job import load_job
    from trigrid.report.goodput import account_of
    from trigrid.report.goodput_text import account_json, account_text, prospect_json, prospect_text
    from trigrid.report.prospect import prospect_of

    run_folder(folder, "report", " and no job file (.toml)")
    job = load_job(folder / "job.toml", env={})
    with console.waiting("reading the run's events and metrics"):
        found = account_of(folder, time.time())
    if found is None:
        reason = "has no events (events.jsonl): it has not started, or is of a version that wrote none"
        raise Refused([Problem("report", folder, reason)])
    prospect = prospect_of(job, known, found)
    if as_json:
        print_json({**account_json(found, job.run.steps), "expected": prospect_json(prospect)})
    else:
        name = folder.resolve().name
        print(f"{account_text(name, found, job.run.steps)}\n\n{prospect_text(prospect)}")


def _job(
    path: Path,
    overrides: tuple[str, ...],
    days: float,
    runs: int,
    seed: int,
    shape: float,
    known: Known,
    as_json: bool,
    console: Console,
) -> None:
    from trigrid.job import load_job
    from trigrid.plan.long_run import simulate_runs
    from trigrid.report.goodput_text import SCHEMA, prospect_json, prospect_text, spread_json, spread_text
    from trigrid.report.prospect import prospect_of

    job = load_job(path, overrides)
    prospect = prospect_of(job, known)
    played = prospect.used or prospect.best
    with console.progress() as progress:
        spread = simulate_runs(
            played, days, runs, seed, shape, lambda done, total: progress("runs played", done, total)
        )
    if as_json:
        told = {"model": job.model.name, "expected": prospect_json(prospect)}
        print_json({"schema": SCHEMA, **told, "played": spread_json(spread, days, seed, shape)})
    else:
        text = prospect_text(prospect, spread, f"{job.model.name}: expected")
        print(f"{text}\n\n{spread_text(played, spread, days, seed, shape)}")
