"""Every collective and message of one training step of one rank, counted: calls and payload bytes by axis and kind.

The payload is the whole array, as in the engine's own count: what an all-gather yields, what a reduce-scatter takes.
A group of one rank moves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from trigrid.blueprint.buckets import BucketLayout, Run, UnitBuckets, job_buckets, stretches
from trigrid.blueprint.frozen import entered_again, frozen_parameters
from trigrid.grid import Grid, grid_of
from trigrid.plan.scheduled import job_schedule
from trigrid.schedule import Kind, Schedule, receives, sends_to
from trigrid.spec.job import Job
from trigrid.spec.layout import ZeroPolicy, zero_policy
from trigrid.spec.precision import FORMAT_BYTES, PRECISIONS

TransferKind = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "receive"]
WIDE_BYTES = 8


class Count(NamedTuple):
    calls: int
    payload_bytes: int


def step_traffic(job: Job, rank: int) -> dict[tuple[str, TransferKind], Count]:
    """What the engine's step moves on `rank`."""
    grid = grid_of(job)
    found: dict[tuple[str, TransferKind], list[int]] = defaultdict(lambda: [0, 0])

    def add(axis: str, kind: TransferKind, payload_bytes: int, calls: int = 1) -> None:
        if calls and payload_bytes and len(grid.group(axis, rank)) > 1:
            found[axis, kind][0] += calls
            found[axis, kind][1] += calls * payload_bytes

    at = grid.coord(rank)
    buckets, stages = job_buckets(job, at.pp, at.tp)
    microbatches = job.batch.microbatches(job.parallel)
    policy = zero_policy(job.parallel)
    frozen = frozen_parameters(job)
    add("world", "all_reduce", 6 * WIDE_BYTES)  # the shape of the step, largest and smallest
    add("batch", "all_reduce", WIDE_BYTES)  # valid tokens
    for stage, units in stages.items():
        for unit in units:
            _tensor_parallel(job, unit, job.parallel.recompute_of(stage) == "full", microbatches, frozen, add)
    schedule = job_schedule(job)
    for bucket in buckets.values():
        _zero(job, bucket, policy, _uses(schedule, stages, bucket.name), add)
    _boundaries(job, schedule, at.pp, add)
    _finish(job, grid, rank, buckets, policy, add)
    return {key: Count(*count) for key, count in found.items()}


class Add(Protocol):
    """Counts calls of one transfer, each with the same payload."""

    def __call__(self, axis: str, kind: TransferKind, payload_bytes: int, calls: int = 1) -> None: ...


def _tensor_parallel(
    job: Job, placed: UnitBuckets, recompute: bool, microbatches: int, frozen: frozenset[str], add: Add
) -> None:
    """Regions of a unit (Shoeybi 2019, figure 4; Korthikanti 2022, section 4.2.2): entering gathers, leaving sums;
    backward does the other. Full recomputation runs the forward twice."""
    compute = FORMAT_BYTES[PRECISIONS[job.run.precision].compute]
    tokens = job.batch.micro_batch * job.batch.sequence
    activation = tokens * job.model.hidden * compute
    forwards = microbatches * (2 if recompute and placed.backward else 1)
    enters, leaves = {"embedding": (0, 1), "llama": (2, 2), "gpt": (2, 2), "head": (1, 0)}[placed.unit.kind]
    backwards = microbatches * placed.backward
    if job.parallel.sequence_parallel:
        trained = {parameter.role for parameter in placed.unit.parameters if parameter.name not in frozen}
        again = entered_again(trained) if job.parallel.regather else 0
        # Of a frozen embedding nothing has a gradient before positions are added.
        back = leaves if placed.unit.kind != "embedding" or "embedding" in trained else 0
        add("tp", "all_gather", activation, enters * forwards + (back + again) * backwards)
        add("tp", "reduce_scatter", activation, leaves * forwards + enters * backwards)
    else:
        add("tp", "all_reduce", activation, leaves * forwards + enters * backwards)
    if placed.unit.kind == "head":
        chunks = job.parallel.loss_chunks
        wide = max(compute, FORMAT_BYTES["fp32"]) * tokens // chunks
        add("tp", "all_reduce", wide, chunks * forwards)  # largest logit
        add("tp", "all_reduce", 2 * wide, chunks * forwards)  # sum of exponentials, the label's logit


class _Uses(NamedTuple):
    """How often a step opens a bucket, and how often it is through with gradients of it."""

    opened: int
    reduced: int


def _uses(schedule: Schedule, stages: Mapping[int, tuple[UnitBuckets, ...]], bucket: str) -> _Uses:
    opened = reduced = 0
    for stage, units in stages.items():
        actions = [action.kind for actions in schedule.ranks for action in actions if action.stage == stage]
        whole, split = actions.count(Kind.BACKWARD), actions.count(Kind.INPUT)
        back = [unit for unit in units if unit.backward]
        through = stretches(back, bucket)
        # An input backward leaves out the embedding, which then has all of its own to itself.
        apart = [[u for u in back if (u.unit.kind == "embedding") == embeds] for embeds in (False, True)]
        opened += actions.count(Kind.FORWARD) * stretches(units, bucket) + whole * through
        opened += split * sum(stretches(part, bucket) for part in apart)
        reduced += (whole + split) * through
    return _Uses(opened, reduced)


def _zero(job: Job, bucket: BucketLayout, policy: ZeroPolicy, uses: _Uses, add: Add) -> None:
    """Gradients are reduced once per step or per backward, weights gathered once per step or per use; frozen ones have
    no gradients and do not change."""
    precision = PRECISIONS[job.run.precision]
    gradients = bucket.numel * FORMAT_BYTES[precision.reduce]
    weights = bucket.numel * FORMAT_BYTES[precision.gather]
    if policy.gather_per_use:
        add("zero", "all_gather", weights, uses.opened)
    elif policy.shard_weights or (policy.shard_optimizer and not bucket.frozen):
        add("zero", "all_gather", weights)
    if bucket.frozen:
        return
    if policy.reduce_per_microbatch:
        add("zero", "reduce_scatter", gradients, uses.reduced)
    else:
        add("zero", "reduce_scatter" if policy.shard_optimizer else "all_reduce", gradients)
    held = bucket.shard_numel if policy.shard_optimizer else bucket.numel
    add("replicate", "all_reduce", held * FORMAT_BYTES[precision.reduce])


def _boundaries(job: Job, schedule: Schedule, pp_rank: int, add: Add) -> None:
    """Activations and their gradients between stages, from the schedule itself."""
    cut = job.parallel.tp if job.parallel.sequence_parallel else 1
    tokens = job.batch.micro_batch * job.batch.sequence // cut
    boundary = tokens * job.model.hidden * FORMAT_BYTES[PRECISIONS[job.run.precision].compute]
    for action in schedule.ranks[pp_rank]:
        add("pp", "send", boundary, int(sends_to(schedule, action) is not None))
        add("pp", "receive", boundary, int(receives(schedule, action) is not None))


def _finish(job: Job, grid: Grid, rank: int, buckets: dict[str, BucketLayout], policy: ZeroPolicy, add: Add) -> None:
    """Partial gradients over TP, the tied embedding, and the one all-reduce of norm², flag, loss and wish to stop."""
    reduce = FORMAT_BYTES[PRECISIONS[job.run.precision].reduce]
    shard = grid.group("zero", rank).index(rank)

    def held(bucket: BucketLayout) -> tuple[Run, ...]:
        return bucket.shard_runs(shard) if policy.shard_optimizer else bucket.runs

    trained = [bucket for bucket in buckets.values() if not bucket.frozen]
    for group in ("tp", "kv"):
        parts = [run.stop - run.start for b in trained for run in held(b) if run.sum_group == group]
        add(group, "all_reduce", sum(parts) * reduce)
    for bucket in trained:
        if bucket.tied:
            numel = bucket.shard_numel if policy.shard_optimizer else bucket.numel
            add("tied", "all_reduce", numel * reduce)
    add("world", "all_reduce", 4 * WIDE_BYTES)
