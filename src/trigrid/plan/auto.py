"""The plan of a job whose schedule is made for its own stages: `schedule = "auto"`.

Its stages sit round and round the ranks. The schedule may hold what is left of the accelerators beside everything
else: up to the planner's margin below the ceiling where that is enough, up to the ceiling where it is not; of a job
that does not fit at all, what its named schedule holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from trigrid.plan.memory import StageMemory, StageUse
from trigrid.plan.notes import notes
from trigrid.plan.plan import DOES_NOT_FIT, SAFE, TIGHT, Interval, Plan, Stage, make_plan
from trigrid.plan.software import Software
from trigrid.plan.stages import Stages, stages_of, step_of
from trigrid.plan.step import Step, StepTime
from trigrid.schedule import Durations, Timeline, make_schedule, order_of, peak_bytes, replay
from trigrid.schedule.auto import Auto, auto_schedule
from trigrid.schedule.limits import Limits
from trigrid.schedule.times import Times
from trigrid.spec.job import Job
from trigrid.spec.layout import ScheduleName

PRECISION_BYTES = 2**20


def named_job(job: Job) -> Job:
    """`job` with the named schedule of as many stages in place of auto."""
    name: ScheduleName = "1f1b" if job.parallel.virtual_stages == 1 else "interleaved"
    return replace(job, parallel=replace(job.parallel, schedule=name))


def auto_job(job: Job) -> Job:
    """`job` with auto in place of its schedule."""
    return replace(job, parallel=replace(job.parallel, schedule="auto"))


def auto_of(job: Job, software: Software | None = None, times: Times | None = None) -> Auto:
    """The schedule made for `job`, whose schedule is auto. times: in place of the planner's."""
    return _made(make_plan(named_job(job), software), times)[2]


def _made(plan: Plan, times: Times | None = None) -> tuple[Stages, tuple[int, ...], Auto]:
    """The stages of `plan`, which has a named schedule, what this holds of microbatches under way, and the one made."""
    step, setup = step_of(plan.job, plan.software), plan.setup
    stages = stages_of(step, setup)
    named = make_schedule(setup.schedule, setup.pp, setup.microbatches, setup.virtual)
    own = peak_bytes(named, stages.forward_bytes, stages.weight_bytes)
    margin = plan.machine.values["interval.memory"]
    durations, halved = times or Times(stages.durations, True)
    for ceiling in (plan.ceiling_bytes / (1 + margin), plan.ceiling_bytes, None):
        most = tuple(map(float, own)) if ceiling is None else _room(step, plan, own, ceiling)
        limits = Limits(forward_bytes=stages.forward_bytes, weight_bytes=stages.weight_bytes, most_bytes=most)
        try:
            return stages, own, _cached(durations, setup.microbatches, stages.placement, limits, halved)
        except ValueError:
            continue
    raise AssertionError("a schedule's own peaks leave room for it")


@lru_cache(maxsize=16)
def _cached(
    durations: Durations, microbatches: int, placement: tuple[int, ...], limits: Limits, halved: bool
) -> Auto:
    return auto_schedule(durations, microbatches, placement, limits, split=halved)


def _room(step: Step, plan: Plan, own: Sequence[int], ceiling: float) -> tuple[float, ...]:
    """Bytes that each rank may hold for microbatches under way and stay below `ceiling`; own: what the plan's schedule
    holds of them."""
    found = []
    for stage, held in zip(plan.stages, own, strict=True):
        low, high = 0.0, 2.0 * plan.ceiling_bytes
        while high - low > PRECISION_BYTES:
            room = (low + high) / 2
            use = _holding(stage.memory.use, room - held)
            low, high = (room, high) if step.memory.device_bytes(plan.setup, use) <= ceiling else (low, room)
        found.append(low)
    return tuple(found)


def _holding(use: StageUse, more: float) -> StageUse:
    """`use` with `more` bytes of microbatches under way; what the optimizer's update needs may stay more than that."""
    moving = use.moving + more
    if use.moment != "optimizer":
        return use._replace(activations=use.activations + more, moving=moving)
    if sum(use.state) + moving <= use.training_bytes:
        return use._replace(moving=moving)
    return use._replace(activations=moving, transients=0.0, moment="block", moving=moving)


def auto_plan(job: Job, software: Software | None = None) -> Plan:
    """The plan of `job`, whose schedule is auto: that of `named_job`, with what the schedule changes."""
    plan = make_plan(named_job(job), software)
    if plan.setup.pp == 1:
        return replace(plan, job=job)
    stages, own, auto = _made(plan)
    step, setup = step_of(plan.job, plan.software), plan.setup
    peaks = peak_bytes(auto.schedule, stages.forward_bytes, stages.weight_bytes)
    held = tuple(_stage(step, plan, *found) for found in zip(plan.stages, own, peaks, strict=True))
    time = _time(plan.time, replay(order_of(auto.schedule), stages.durations))
    faster = plan.time.step_s / time.step_s
    spread, fullest = plan.machine.values["interval.time"], max(stage.memory.total_bytes for stage in held)
    utilisation = plan.mfu_full_attention * faster
    return replace(
        plan,
        job=job,
        setup=setup._replace(schedule="auto"),
        stages=held,
        time=time,
        step_s=Interval(time.step_s * (1 - spread), time.step_s, time.step_s * (1 + spread)),
        tokens_per_s=plan.tokens_per_s * faster,
        mfu_full_attention=utilisation,
        mfu_causal=plan.mfu_causal * faster,
        warnings=notes(step, setup, time, fullest, plan.ceiling_bytes, utilisation),
        assumptions=(
            *plan.assumptions,
            f"schedule made for these stages: {auto.gap:.1%} above what no schedule can beat"
            + (f"; {auto.named} takes {auto.named_s / auto.step_s - 1:.1%} longer" if auto.named else ""),
        ),
    )


def _stage(step: Step, plan: Plan, stage: Stage, own: int, peak: int) -> Stage:
    """`stage` where `peak` bytes of microbatches under way are held in place of `own`."""
    use = _holding(stage.memory.use, peak - own)
    ledger = step.memory.ledger(plan.setup, use)
    unmodelled = round(ledger.total_bytes * plan.machine.values["interval.memory"])
    verdict = DOES_NOT_FIT if ledger.total_bytes > plan.ceiling_bytes else SAFE
    if verdict == SAFE and ledger.total_bytes + unmodelled > plan.ceiling_bytes:
        verdict = TIGHT
    return replace(stage, memory=StageMemory(use, ledger), margin_bytes=unmodelled, verdict=verdict)


def _time(named: StepTime, timeline: Timeline) -> StepTime:
    """The step with the made schedule's timeline: its rank that works longest does the same, and idles less or more."""
    saved = named.pipeline_s - timeline.step_s
    parts = dict(named.parts_s)
    before = named.step_s - parts["jitter"] - parts["fixed"]
    waiting = parts["p2p"] + parts["idle"] - saved
    parts["p2p"] = min(waiting, parts["p2p"])
    parts["idle"] = waiting - parts["p2p"]
    parts["jitter"] *= (before - saved) / before
    return replace(
        named,
        step_s=sum(parts.values()),
        parts_s=parts,
        bubble_ratio=timeline.bubble_ratio,
        idle_share=timeline.idle_share,
        pipeline_s=timeline.step_s,
    )
