"""The schedule that a job runs: a named one, or one read from a file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from trigrid.errors import Problem, Refused
from trigrid.schedule.actions import Kind, Schedule
from trigrid.schedule.files import read_schedule
from trigrid.schedule.generators import forward_only, make_schedule
from trigrid.schedule.validate import validate
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout


def job_schedule(job: Job, microbatches: int | None = None) -> Schedule:
    """The schedule of a step of `job`, validated; of a step of another number of `microbatches`, where it has a name.

    Raises Refused for a file that cannot be read, or whose schedule is not for this layout and batch.
    """
    layout = job.parallel
    m = job.batch.microbatches(layout) if microbatches is None else microbatches
    if layout.schedule_file:
        return _read(layout, m)
    return _made(layout.schedule, layout.pp, m, layout.virtual_stages)


@lru_cache(maxsize=8)
def evaluation_schedule(layout: Layout, microbatches: int) -> Schedule:
    """All forwards of `microbatches`, validated."""
    schedule = forward_only(layout.pp, microbatches, layout.placement)
    validate(schedule, (Kind.FORWARD,))
    return schedule


def splits_backward(schedule: Schedule) -> bool:
    """Whether any backward is in two halves."""
    return any(action.kind is Kind.INPUT for actions in schedule.ranks for action in actions)


@lru_cache(maxsize=8)
def _made(name: str, pp: int, microbatches: int, virtual_stages: int) -> Schedule:
    schedule = make_schedule(name, pp, microbatches, virtual_stages)
    validate(schedule)
    return schedule


@lru_cache(maxsize=8)
def _read(layout: Layout, microbatches: int) -> Schedule:
    schedule = read_schedule(Path(layout.schedule_file))
    problems = []

    def refuse(what: str, legal: object) -> None:
        problems.append(Problem("parallel.schedule_file", layout.schedule_file, what, (legal,)))

    if schedule.placement != layout.placement:
        wanted = f"{layout.schedule} puts its {layout.stages} stages on ranks {list(layout.placement)}"
        refuse(f"puts its {schedule.stages} stages on ranks {list(schedule.placement)}; {wanted}", "the same places")
    if schedule.microbatches != microbatches:
        refuse(f"has {schedule.microbatches} microbatches, a step has {microbatches}", microbatches)
    if problems:
        raise Refused(problems)
    return schedule
