"""The schedule that a job runs: a named one, one read from a file, or one made for its stages."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from trigrid.errors import Problem, Refused
from trigrid.plan.auto import auto_of, named_job
from trigrid.plan.stages import step_of
from trigrid.schedule import Schedule, validate
from trigrid.schedule.of_job import splits_backward, stated_schedule
from trigrid.spec.job import Job
from trigrid.spec.run_rules import AT_ONCE


def job_schedule(job: Job, microbatches: int | None = None) -> Schedule:
    """The schedule of a step of `job`, validated; of a step of another number of `microbatches`, where it is of no
    file.

    One that is made for the job (`schedule = "auto"`) is made once in a process, and is the same in all that do the
    same arithmetic. Raises Refused for a file that cannot be read, or whose schedule is not for this layout and batch.
    """
    m = job.batch.microbatches(job.parallel) if microbatches is None else microbatches
    if made_here(job):
        return _made(job, m)
    return stated_schedule(job, m)


def check_schedule(job: Job) -> None:
    """Raise Refused where `job_schedule` would, without the work of making one, and where run.compile does not go with
    what a file has."""
    file = job.parallel.schedule_file
    if made_here(job):
        step_of(named_job(job))
    elif file and splits_backward(job_schedule(job)) and job.run.compile:
        raise Refused([Problem("parallel.schedule_file", file, f"splits {AT_ONCE}", ("one of whole backwards",))])


def made_here(job: Job) -> bool:
    """Whether the schedule is to be made from the times of the job's stages."""
    return job.parallel.schedule == "auto" and not job.parallel.schedule_file


@lru_cache(maxsize=8)
def _made(job: Job, microbatches: int) -> Schedule:
    if job.parallel.pp == 1:
        return stated_schedule(named_job(job), microbatches)
    batch = replace(job.batch, global_batch=microbatches * job.parallel.dp * job.batch.micro_batch)
    schedule = auto_of(replace(job, batch=batch)).schedule
    validate(schedule)
    return schedule
