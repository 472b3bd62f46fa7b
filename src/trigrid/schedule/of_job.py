"""The schedules that a job states: a named one, or one read from a file. (plan/scheduled.py: one made for it.)"""

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


def stated_schedule(job: Job, microbatches: int) -> Schedule:
    """The schedule of a step of `job`, validated; of a step of another number of `microbatches`, where it has a name.

    Raises Refused as `file_schedule` does.
    """
    layout = job.parallel
    if layout.schedule_file:
        return _read(job, microbatches)
    return _made(layout.schedule, layout.pp, microbatches, layout.virtual_stages)


def file_schedule(job: Job, path: Path, key: str, microbatches: int) -> Schedule:
    """The schedule in `path`, validated. key: what the user calls the file.

    Raises Refused for a file that cannot be read, or whose schedule is not for the layout and batch of `job`.
    """
    layout, schedule, problems = job.parallel, read_schedule(path, key), []
    if schedule.placement != layout.placement:
        wanted = f"{layout.schedule} puts its {layout.stages} stages on ranks {list(layout.placement)}"
        reason = f"puts its {schedule.stages} stages on ranks {list(schedule.placement)}; {wanted}"
        problems.append(Problem(key, path, reason, ("the same places",)))
    if schedule.microbatches != microbatches:
        batch = schedule.microbatches * layout.dp * job.batch.micro_batch
        reason = f"has {schedule.microbatches} microbatches, a step has {microbatches}"
        problems.append(Problem(key, path, reason, (f"batch.global_batch = {batch}",)))
    if problems:
        raise Refused(problems)
    return schedule


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
def _read(job: Job, microbatches: int) -> Schedule:
    return file_schedule(job, Path(job.parallel.schedule_file), "parallel.schedule_file", microbatches)
