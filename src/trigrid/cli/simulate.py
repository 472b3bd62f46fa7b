"""`trigrid simulate`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trigrid.cli.app import Json, Overrides, Quiet, app, examples, print_json, searched_job

if TYPE_CHECKING:
    from trigrid.plan.simulate import Simulation
    from trigrid.plan.stragglers import Faults
    from trigrid.spec.job import Job

PAGE_COLUMNS = 100
LARGEST_FACTOR = 1000.0
MOST_REPETITIONS = 100_000


@app.command(
    help_epilogue=examples(
        "trigrid simulate examples/llama3-405b.toml",
        "trigrid simulate job.toml --schedule zb-h1 --trace step.json --svg step.svg",
        "trigrid simulate job.toml --schedule auto --save-schedule auto.json",
        "trigrid simulate job.toml --slow-rank 17:1.3 --slow-link 3-4:10",
        "trigrid simulate job.toml --jitter 0.02 --repetitions 1000",
        "trigrid simulate job.toml --fail 17:0.5 --fail 40:0.9",
        "trigrid simulate llama3-70b --gpus 64 --tp 8 --pp 4 --global-batch 64",
    )
)
def simulate(
    *arguments: Overrides,
    gpus: Annotated[int | None, Parameter(help="GPUs to use at most.")] = None,
    durations: Annotated[
        Path | None, Parameter(help="A CSV of stage,kind,seconds, or a run's folder, in place of the planner's times.")
    ] = None,
    schedule_file: Annotated[
        Path | None, Parameter(help="A schedule (CSV or JSON of actions) in place of the job's.")
    ] = None,
    slow_rank: Annotated[
        tuple[str, ...], Parameter(negative="", help="RANK:FACTOR on the compute times of one GPU; may be repeated.")
    ] = (),
    slow_link: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="FROM-TO:FACTOR on messages between two pipeline ranks; may be repeated."),
    ] = (),
    jitter: Annotated[
        float, Parameter(help="σ: in each repetition each GPU's times are multiplied with exp(σ·z), z normal.")
    ] = 0.0,
    seed: Annotated[int, Parameter(help="Seed of the jitter.")] = 0,
    repetitions: Annotated[int, Parameter(help="Steps to play with jitter.")] = 1,
    fail: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="RANK:SECONDS: that GPU stops so long after the start; may be repeated."),
    ] = (),
    balance: Annotated[
        bool, Parameter(negative="", help="Give stages the layers that make the slowest one fastest.")
    ] = False,
    trace: Annotated[Path | None, Parameter(help="Write the timeline for Perfetto or chrome://tracing here.")] = None,
    svg: Annotated[Path | None, Parameter(help="Write the timeline as a picture here.")] = None,
    save_schedule: Annotated[Path | None, Parameter(help="Write the schedule here, a .csv or .json file.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Play a job's pipeline schedule: step, bubble, exposed communication and memory over time, without a GPU.

    ARGUMENTS are those of `trigrid plan`: a job file or a model, and flags that give values of a job. `trigrid compare`
    lays the step that a run has recorded beside it.
    """
    from trigrid.plan.balance import balanced_job
    from trigrid.plan.simulate import simulate as play
    from trigrid.plan.stragglers import failures, statistics, stragglers, together_s
    from trigrid.report.balance import balance_text
    from trigrid.report.console import Console
    from trigrid.report.simulate import (
        failure_text,
        simulation_json,
        simulation_text,
        statistics_text,
        straggler_text,
    )

    console = Console(quiet)
    _check_paths(trace=trace, svg=svg, save_schedule=save_schedule)
    job = searched_job(arguments, gpus)
    faults = _faults(job, slow_rank, slow_link, jitter, seed, repetitions, fail)
    texts = []
    if balance:
        split = balanced_job(job)
        texts.append(balance_text(split))
        job = split.job
    simulation = play(job, durations=durations, schedule=schedule_file)
    _check_links(simulation, faults)
    slow = stragglers(simulation, faults)
    together = together_s(simulation, faults) if slow else None
    failed = failures(simulation, faults)
    spread = statistics(simulation, faults) if faults.jitter else None
    _write(simulation, trace, svg, save_schedule, console.say)
    if as_json:
        print_json(simulation_json(simulation, faults, slow, together, failed, spread))
        return
    columns = shutil.get_terminal_size((PAGE_COLUMNS, 24)).columns
    texts.append(simulation_text(simulation, columns))
    if together is not None:
        texts.append(straggler_text(simulation, slow, together))
    if failed:
        texts.append(failure_text(simulation, failed))
    if spread:
        texts.append(statistics_text(simulation, faults, spread))
    print("\n\n".join(texts))


def _faults(
    job: Job,
    slow_rank: tuple[str, ...],
    slow_link: tuple[str, ...],
    jitter: float,
    seed: int,
    repetitions: int,
    fail: tuple[str, ...],
) -> Faults:
    from trigrid.errors import Problem, Refused
    from trigrid.plan.stragglers import Faults

    problems: list[Problem] = []
    world, ranks, links = job.parallel.world, dict[int, float](), dict[tuple[int, int], float]()
    stops: dict[int, float] = {}
    for text in slow_rank:
        place, _, factor = text.partition(":")
        rank, times = _whole(place, world), _number(factor, 1.0, LARGEST_FACTOR)
        if rank is None or times is None:
            reason = f"RANK:FACTOR, a rank from 0 to {world - 1} and a factor from 1 to {LARGEST_FACTOR:g}, is needed"
            problems.append(Problem("slow-rank", text, reason))
        else:
            ranks[rank] = times
    for text in slow_link:
        place, _, factor = text.partition(":")
        ends = [_whole(end, job.parallel.pp) for end in place.split("-")]
        times = _number(factor, 1.0, LARGEST_FACTOR)
        if len(ends) != 2 or ends[0] is None or ends[1] is None or times is None:
            reason = (
                f"FROM-TO:FACTOR with pipeline ranks from 0 to {job.parallel.pp - 1} and a factor from 1 to "
                f"{LARGEST_FACTOR:g} is needed"
            )
            problems.append(Problem("slow-link", text, reason))
        else:
            links[ends[0], ends[1]] = times
    for text in fail:
        place, _, after = text.partition(":")
        rank, time_s = _whole(place, world), _number(after, 0.0, float("inf"))
        if rank is None or time_s is None:
            problems.append(Problem("fail", text, f"RANK:SECONDS with a rank from 0 to {world - 1} is needed"))
        elif rank in stops:
            problems.append(Problem("fail", text, f"rank {rank} stops at {stops[rank]:g} s already"))
        else:
            stops[rank] = time_s
    if not 0 <= jitter <= 1:
        legal = (min(max(jitter, 0), 1),) if isfinite(jitter) else ()
        problems.append(Problem("jitter", jitter, "must be from 0 to 1", legal))
    if not 1 <= repetitions <= MOST_REPETITIONS:
        nearest = min(max(repetitions, 1), MOST_REPETITIONS)
        problems.append(Problem("repetitions", repetitions, f"must be from 1 to {MOST_REPETITIONS:,}", (nearest,)))
    elif repetitions > 1 and not jitter:
        problems.append(Problem("repetitions", repetitions, "without --jitter all of them are the same", (1,)))
    if problems:
        raise Refused(problems)
    return Faults(slow_ranks=ranks, slow_links=links, jitter=jitter, seed=seed, repetitions=repetitions, stops=stops)


def _whole(text: str, below: int) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 and int(text) < below else None


def _number(text: str, low: float, high: float) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and low <= value <= high else None


def _check_paths(**paths: Path | None) -> None:
    """Before anything is computed, so that no file is written where another cannot be."""
    from trigrid.errors import Problem, Refused

    problems = [
        Problem(name.replace("_", "-"), path, "its folder is not there")
        for name, path in paths.items()
        if path and not path.parent.is_dir()
    ]
    if problems:
        raise Refused(problems)


def _check_links(simulation: Simulation, faults: Faults) -> None:
    from trigrid.errors import Problem, Refused
    from trigrid.schedule import channels

    used = channels(simulation.schedule)
    problems = [
        Problem(
            "slow-link",
            f"{a}-{b}",
            f"schedule {simulation.schedule.name} sends nothing there",
            tuple(f"{x}-{y}" for x, y in used if x == a),
        )
        for a, b in faults.slow_links
        if (a, b) not in used
    ]
    end_s = simulation.timeline.step_s
    problems += [
        Problem("fail", f"{rank}:{time_s:g}", f"is after the pipeline's end: it takes {end_s:.3g} s")
        for rank, time_s in faults.stops.items()
        if time_s >= end_s
    ]
    if problems:
        raise Refused(problems)


def _write(
    simulation: Simulation, trace: Path | None, svg: Path | None, schedule: Path | None, say: Callable[[str], None]
) -> None:
    from trigrid.report.timeline import write_svg
    from trigrid.report.trace import simulation_trace, write_trace
    from trigrid.schedule import write_schedule

    if trace:
        write_trace(simulation_trace(simulation), trace)
        say(f"{trace} is written; open it at ui.perfetto.dev or chrome://tracing")
    if svg:
        title = f"{simulation.job.model.name}, {simulation.schedule.name}"
        write_svg(simulation.timeline, svg, title)
        say(f"{svg} is written")
    if schedule:
        write_schedule(simulation.schedule, schedule, "save-schedule")
        say(f"{schedule} is written")
