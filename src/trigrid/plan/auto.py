"""A schedule made for the stages of a job: `schedule = "auto"`.

Its stages sit round and round the ranks. The schedule may hold what is left of the accelerators beside everything
else: up to the planner's margin below the ceiling where that is enough, up to the ceiling where it is not; of a job
that does not fit at all, what its named schedule holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from trigrid.plan.memory import StageUse
from trigrid.plan.plan import Plan, make_plan
from trigrid.plan.software import Software
from trigrid.plan.stages import Stages, stages_of, step_of
from trigrid.plan.step import Step
from trigrid.schedule import Durations, make_schedule, peak_bytes
from trigrid.schedule.auto import Auto, auto_schedule
from trigrid.schedule.limits import Limits
from trigrid.schedule.times import Times
from trigrid.spec.job import Job
from trigrid.spec.layout import ScheduleName

PRECISION_BYTES = 2**20


def named_job(job: Job) -> Job:
    """`job`, where its schedule is auto with the named one of as many stages in place of that."""
    if job.parallel.schedule != "auto":
        return job
    name: ScheduleName = "1f1b" if job.parallel.virtual_stages == 1 else "interleaved"
    return replace(job, parallel=replace(job.parallel, schedule=name))


def auto_job(job: Job) -> Job:
    """`job` with auto in place of its schedule."""
    return replace(job, parallel=replace(job.parallel, schedule="auto"))


def auto_of(job: Job, software: Software | None = None, times: Times | None = None) -> Auto:
    """The schedule made for `job`, whose schedule is auto. times: in place of the planner's."""
    return made_for(make_plan(named_job(job), software), times)


def made_for(plan: Plan, times: Times | None = None) -> Auto:
    """The schedule made for the stages of `plan`, which has a named one. times: in place of the planner's."""
    step, setup = step_of(plan.job, plan.software), plan.setup
    stages = stages_of(step, setup)
    named = make_schedule(setup.schedule, setup.pp, setup.microbatches, setup.virtual)
    forward_bytes, weight_bytes = with_head(step, stages)
    own = peak_bytes(named, forward_bytes, weight_bytes)
    margin = plan.machine.values["interval.memory"]
    durations, halved = times or Times(stages.durations, True)
    for ceiling in (plan.ceiling_bytes / (1 + margin), plan.ceiling_bytes, None):
        most = tuple(map(float, own)) if ceiling is None else _room(step, plan, own, ceiling)
        limits = Limits(forward_bytes=forward_bytes, weight_bytes=weight_bytes, most_bytes=most)
        try:
            return _cached(durations, setup.microbatches, stages.placement, limits, halved)
        except ValueError:
            continue
    raise AssertionError("a schedule's own peaks leave room for it")


@lru_cache(maxsize=16)
def _cached(durations: Durations, microbatches: int, placement: tuple[int, ...], limits: Limits, halved: bool) -> Auto:
    return auto_schedule(durations, microbatches, placement, limits, split=halved)


def _room(step: Step, plan: Plan, own: Sequence[int], ceiling: float) -> tuple[float, ...]:
    """Bytes that each rank may hold for microbatches under way and stay below `ceiling`; own: what the plan's schedule
    holds of them."""
    found = []
    for stage, held in zip(plan.stages, own, strict=True):
        low, high = 0.0, 2.0 * plan.ceiling_bytes
        while high - low > PRECISION_BYTES:
            room = (low + high) / 2
            use = holding(stage.memory.use, room - held)
            low, high = (room, high) if step.memory.device_bytes(plan.setup, use) <= ceiling else (low, room)
        found.append(low)
    return tuple(found)


def with_head(step: Step, stages: Stages) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`forward_bytes` and `weight_bytes` of the stages, on the last with what head and loss keep of a microbatch."""
    setup, last = stages.setup, len(stages.placement) - 1
    head = step.memory.unit("head", setup.cut, "none")
    forward = 0 if setup.at(last).recompute == "full" else round(head.saved)
    weight = 0 if step.software.kernels.loss == "pieces" else round(head.for_weights)
    return (
        (*stages.forward_bytes[:-1], stages.forward_bytes[-1] + forward),
        (*stages.weight_bytes[:-1], stages.weight_bytes[-1] + weight),
    )


def holding(use: StageUse, more: float) -> StageUse:
    """`use` with `more` bytes of microbatches under way; what the optimizer's update needs may stay more than that."""
    moving = use.moving + more
    if use.moment == "reduce":
        # Earlier in the step there may then be more than that.
        stays = sum(use.state) + use.inputs
        earlier = max(peak for name, peak in use.peaks if name in ("loss", "block")) - stays + more
        if earlier <= use.moving:
            return use
        return use._replace(activations=earlier, transients=0.0, buffers=0.0, moment="block", moving=earlier)
    if use.moment != "optimizer":
        return use._replace(activations=use.activations + more, moving=moving)
    if sum(use.state) + moving <= use.training_bytes:
        return use._replace(moving=moving)
    return use._replace(activations=moving, transients=0.0, moment="block", moving=moving)
