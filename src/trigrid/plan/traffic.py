"""Every collective and message of one training step of one rank, counted: calls and payload bytes by axis and kind.

The payload is the whole array, as in the engine's own count: what an all-gather yields, what a reduce-scatter takes.
A group of one rank moves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal, NamedTuple, Protocol

from trigrid.blueprint.buckets import BucketLayout, Run, UnitBuckets, job_buckets, stretches
from trigrid.grid import Grid, grid_of
from trigrid.schedule import make_schedule, receives, sends_to
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
    add("batch", "all_reduce", WIDE_BYTES)  # valid tokens
    for unit in (unit for units in stages.values() for unit in units):
        _tensor_parallel(job, unit, microbatches, add)
    for bucket in buckets.values():
        forwards = sum(stretches(units, bucket.name) for units in stages.values())
        backwards = sum(stretches((u for u in units if u.backward), bucket.name) for units in stages.values())
        _zero(job, bucket, policy, forwards * microbatches, backwards * microbatches, add)
    _boundaries(job, at.pp, microbatches, add)
    _finish(job, grid, rank, buckets, policy, add)
    return {key: Count(*count) for key, count in found.items()}


class Add(Protocol):
    """Counts calls of one transfer, each with the same payload."""

    def __call__(self, axis: str, kind: TransferKind, payload_bytes: int, calls: int = 1) -> None: ...


def _tensor_parallel(job: Job, placed: UnitBuckets, microbatches: int, add: Add) -> None:
    """Regions of a unit (Shoeybi 2019, figure 4; Korthikanti 2022, section 4.2.2): entering gathers, leaving sums;
    backward does the other. Full recomputation runs the forward twice."""
    compute = FORMAT_BYTES[PRECISIONS[job.run.precision].compute]
    tokens = job.batch.micro_batch * job.batch.sequence
    activation = tokens * job.model.hidden * compute
    forwards = microbatches * (2 if job.parallel.recompute == "full" and placed.backward else 1)
    enters, leaves = {"embedding": (0, 1), "llama": (2, 2), "gpt": (2, 2), "head": (1, 0)}[placed.unit.kind]
    backwards = microbatches * placed.backward
    if job.parallel.sequence_parallel:
        again = enters if job.parallel.regather and placed.unit.kind != "head" else 0
        add("tp", "all_gather", activation, enters * forwards + (leaves + again) * backwards)
        add("tp", "reduce_scatter", activation, leaves * forwards + enters * backwards)
    else:
        add("tp", "all_reduce", activation, leaves * forwards + enters * backwards)
    if placed.unit.kind == "head":
        chunks = job.parallel.loss_chunks
        wide = max(compute, FORMAT_BYTES["fp32"]) * tokens // chunks
        add("tp", "all_reduce", wide, chunks * forwards)  # largest logit
        add("tp", "all_reduce", 2 * wide, chunks * forwards)  # sum of exponentials, the label's logit


def _zero(job: Job, bucket: BucketLayout, policy: ZeroPolicy, forwards: int, backwards: int, add: Add) -> None:
    """A bucket to which a step comes so often: gradients are reduced once per step or per backward, weights gathered
    once per step or per use; frozen ones have no gradients and do not change."""
    precision = PRECISIONS[job.run.precision]
    gradients = bucket.numel * FORMAT_BYTES[precision.reduce]
    weights = bucket.numel * FORMAT_BYTES[precision.gather]
    if policy.gather_per_use:
        add("zero", "all_gather", weights, forwards + backwards)
    elif policy.shard_weights or (policy.shard_optimizer and not bucket.frozen):
        add("zero", "all_gather", weights)
    if bucket.frozen:
        return
    if policy.reduce_per_microbatch:
        add("zero", "reduce_scatter", gradients, backwards)
    else:
        add("zero", "reduce_scatter" if policy.shard_optimizer else "all_reduce", gradients)
    held = bucket.shard_numel if policy.shard_optimizer else bucket.numel
    add("replicate", "all_reduce", held * FORMAT_BYTES[precision.reduce])


def _boundaries(job: Job, pp_rank: int, microbatches: int, add: Add) -> None:
    """Activations and their gradients between stages, from the schedule itself."""
    schedule = make_schedule(job.parallel.schedule, job.parallel.pp, microbatches)
    cut = job.parallel.tp if job.parallel.sequence_parallel else 1
    tokens = job.batch.micro_batch * job.batch.sequence // cut
    boundary = tokens * job.model.hidden * FORMAT_BYTES[PRECISIONS[job.run.precision].compute]
    for action in schedule.ranks[pp_rank]:
        add("pp", "send", boundary, int(sends_to(schedule, action) is not None))
        add("pp", "receive", boundary, int(receives(schedule, action) is not None))


def _finish(job: Job, grid: Grid, rank: int, buckets: dict[str, BucketLayout], policy: ZeroPolicy, add: Add) -> None:
    """Partial gradients over TP, the tied embedding, and the one all-reduce of norm², flag and loss."""
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
    add("world", "all_reduce", 3 * WIDE_BYTES)
