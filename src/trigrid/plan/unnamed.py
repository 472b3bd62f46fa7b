"""The plan of a job whose schedule has no name: one made for its stages, or one read from a file.

It is the plan of the named schedule in the same places, with what the schedule itself changes: microbatches under way,
the time of the pipeline and all that follows from the two.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trigrid.plan.auto import holding, made_for, named_job, with_head
from trigrid.plan.engine_memory import EngineMemory
from trigrid.plan.memory import StageMemory
from trigrid.plan.notes import notes
from trigrid.plan.plan import Interval, Plan, Stage, judged, make_plan
from trigrid.plan.software import Software
from trigrid.plan.stages import stages_of, step_of
from trigrid.plan.step import Step, StepTime
from trigrid.plan.turns import Turns, turns_of
from trigrid.schedule import Schedule, Timeline, make_schedule, order_of, peak_bytes, replay
from trigrid.schedule.of_job import file_schedule, splits_backward
from trigrid.spec.job import Job


def unnamed_plan(job: Job, software: Software | None = None) -> Plan:
    """The plan of `job`, whose schedule is auto or that of a file. Raises Refused for a file that is not for it."""
    named, file = named_job(job), job.parallel.schedule_file
    plan = make_plan(replace(named, parallel=replace(named.parallel, schedule_file="")), software)
    if file:
        made = file_schedule(job, Path(file), "parallel.schedule_file", plan.setup.microbatches)
        told = f"schedule replayed as it is in {file}"
        return replace(_with(plan, made, told, splits=splits_backward(made)), job=job)
    if plan.setup.pp == 1:
        return replace(plan, job=job)
    auto = made_for(plan)
    told = f"schedule made for these stages: {auto.gap:.1%} above what no schedule can beat"
    if auto.named:
        told += f"; {auto.named} takes {auto.named_s / auto.step_s - 1:.1%} longer"
    found = _with(plan, auto.schedule, told, splits=True)
    return replace(found, job=job, setup=found.setup._replace(schedule="auto"))


def _with(plan: Plan, schedule: Schedule, assumption: str, splits: bool) -> Plan:
    """`plan`, which has a named schedule, with another one of the same stages in the same places; splits: products are
    such that can put off the gradients of their weights."""
    step, setup = step_of(plan.job, plan.software), plan.setup
    stages = stages_of(step, setup)
    named = make_schedule(setup.schedule, setup.pp, setup.microbatches, setup.virtual)
    own, peaks = (peak_bytes(one, *with_head(step, stages)) for one in (named, schedule))
    ranks = zip(plan.stages, own, peaks, turns_of(schedule), strict=True)
    held = tuple(_stage(step, plan, *found, splits=splits) for found in ranks)
    time = _time(plan.time, replay(order_of(schedule), stages.durations))
    faster = plan.time.step_s / time.step_s
    spread, fullest = plan.machine.values["interval.time"], max(stage.memory.total_bytes for stage in held)
    utilisation = plan.mfu_full_attention * faster
    return replace(
        plan,
        stages=held,
        time=time,
        step_s=Interval(time.step_s * (1 - spread), time.step_s, time.step_s * (1 + spread)),
        tokens_per_s=plan.tokens_per_s * faster,
        mfu_full_attention=utilisation,
        mfu_causal=plan.mfu_causal * faster,
        warnings=notes(step, setup, time, fullest, plan.ceiling_bytes, utilisation),
        assumptions=(*plan.assumptions, assumption),
    )


def _stage(step: Step, plan: Plan, stage: Stage, own: int, peak: int, mine: Turns, splits: bool) -> Stage:
    """`stage` where its rank does `mine` and holds `peak` bytes of microbatches under way in place of `own`."""
    memory = step.memory
    if isinstance(memory, EngineMemory):
        use = memory.use_of(plan.setup, stage.stage, mine, splits)
    else:
        use = holding(stage.memory.use, peak - own)
    ledger = step.memory.ledger(plan.setup, use)
    unmodelled, verdict = judged(ledger.total_bytes, plan.ceiling_bytes, plan.machine.values["interval.memory"])
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
