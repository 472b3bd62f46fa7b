"""A job's step played: its schedule with the planner's durations or given ones, as a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trigrid.errors import Problem, Refused
from trigrid.plan.auto import auto_of, named_job
from trigrid.plan.plan import setup_of
from trigrid.plan.software import Software
from trigrid.plan.stages import Stages, stages_of, step_of
from trigrid.schedule import (
    Durations,
    Schedule,
    Timeline,
    bytes_over_time,
    make_schedule,
    order_of,
    replay,
)
from trigrid.schedule.auto import Auto
from trigrid.schedule.of_job import file_schedule, splits_backward
from trigrid.schedule.recorded import read_recorded, times_of
from trigrid.schedule.times import Times, read_durations
from trigrid.schedule.waits import Waits, waits
from trigrid.spec.job import Job

COLLECTIVES = ("tp", "cp", "ep", "zero")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """timeline: of one pipeline. given: whether its durations are not the planner's; what stages hold and what a step
    takes beside the pipeline always is. auto: where the schedule was made for these stages."""

    job: Job
    stages: Stages
    durations: Durations
    given: bool
    timeline: Timeline
    auto: Auto | None

    @property
    def schedule(self) -> Schedule:
        return self.timeline.order.schedule

    @property
    def beyond_s(self) -> float:
        """Seconds of the step before and after the pipeline."""
        return sum(self.stages.beyond_s.values())

    @property
    def step_s(self) -> float:
        """Of the whole step, without waiting for slower pipelines."""
        return self.timeline.step_s + self.beyond_s

    @cached_property
    def waits(self) -> tuple[Waits, ...]:
        return waits(self.timeline)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """By rank (time_s, bytes of microbatches under way from then on), at each change."""
        return bytes_over_time(self.timeline, self.stages.forward_bytes, self.stages.weight_bytes)

    def exposed_s(self, rank: int) -> Mapping[str, float]:
        """Seconds of the step that `rank` spends on collectives beside which nothing runs, by axis; none are known
        where durations are given."""
        mine = [c for c, holder in zip(self.stages.chunks, self.stages.placement, strict=True) if holder == rank]
        m = 0 if self.given else self.schedule.microbatches
        return {name: m * sum(getattr(chunk, f"{name}_s") for chunk in mine) for name in COLLECTIVES}


def simulate(
    job: Job, software: Software | None = None, *, durations: Path | None = None, schedule: Path | None = None
) -> Simulation:
    """Play a step of `job`. software: this project's engine where it is left out.

    durations: in place of the planner's, a CSV (schedule/times.py), a run's folder or its trace.json; schedule:
    a file of actions in place of the job's schedule or schedule_file. Raises Refused where files cannot be read or do
    not go with the job.
    """
    named = named_job(job)
    step = step_of(named, software)
    stages = stages_of(step, setup_of(named, step.software))
    times = _times(durations, stages) if durations else None
    played = times.durations if times else stages.durations
    auto = None
    if schedule:
        made = file_schedule(job, schedule, "schedule-file", stages.setup.microbatches)
    elif job.parallel.schedule_file:
        file = Path(job.parallel.schedule_file)
        made = file_schedule(job, file, "parallel.schedule_file", stages.setup.microbatches)
    elif job.parallel.schedule == "auto":
        auto = auto_of(job, software, times)
        made = auto.schedule
    else:
        made = _named(stages)
    if times and splits_backward(made) and not times.halved:
        reason = f"schedule {made.name} takes backwards in halves: I and W are needed of every stage"
        raise Refused([Problem("durations", durations, reason)])
    timeline = replay(order_of(made), played)
    return Simulation(job=job, stages=stages, durations=played, given=times is not None, timeline=timeline, auto=auto)


def _times(path: Path, stages: Stages) -> Times:
    """The times in `path`, a CSV or what a run has recorded of one step."""
    if path.suffix.lower() != ".json" and not path.is_dir():
        return read_durations(path, len(stages.placement))
    return times_of(read_recorded(path), _named(stages))


def _named(stages: Stages) -> Schedule:
    setup = stages.setup
    return make_schedule(setup.schedule, setup.pp, setup.microbatches, setup.virtual)
