"""Every layout against the single process, by law 1.

A few steps are run under each layout on the same tokens, and gradients and weights are compared parameter by
parameter, wherever a rank holds a piece of one: every copy of a replicated or tied parameter is compared, and every
element must be covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trigrid.blueprint import decoder
from trigrid.blueprint.buckets import job_buckets
from trigrid.blueprint.parameters import LocalParameter
from trigrid.check.pool import Pool
from trigrid.engine.comm import Comm
from trigrid.grid import Grid, grid_of
from trigrid.models.build import build_engine
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout, ZeroStage

STEPS = 3
GRADIENT_LIMIT = {"fp64": 1e-10, "fp32": 1e-5}
WEIGHT_LIMIT = 1e-9
LOSS_LIMIT = {"fp64": 1e-12, "fp32": 1e-5}
# A parameter whose gradient nearly vanishes is measured against this share of the whole gradient: in fp32 more, since a
# sum whose terms cancel, such as the gradient of a bias on keys, is rounding alone.
SMALL = {"fp64": 1e-6, "fp32": 1e-4, "bf16": 1e-4}
# In bf16 a layout may be this much farther from the fp32 reference than the single process is.
BF16_RATIO = 1.25

Array = NDArray[np.float64]
Sabotage = Callable[[], AbstractContextManager[object]]
Pieces = dict[str, tuple[int, Array]]
"""Bucket name → (first element held, elements held)."""


@dataclass(frozen=True)
class RankRun:
    """What one rank saw: losses and norms of each step, gradients of each step, weights after the last, and weights
    whose copies then differed."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[Pieces, ...]
    weights: Pieces
    disagreements: tuple[str, ...]


@dataclass(frozen=True)
class Reference:
    """The single process: losses, norms, and global arrays by parameter name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[dict[str, Array], ...]
    weights: dict[str, Array]


@dataclass(frozen=True)
class Verdict:
    """Worst errors of one layout, in the measures of law 1. `parameter` has the worst gradient (of the first step in
    which one is beyond its limit), or, where only the weights are, the worst weight, or one whose copies differ."""

    layout: Layout
    precision: str
    gradient_error: float
    parameter: str
    weight_error: float
    loss_error: float
    norm_error: float
    passed: bool


def layouts(sizes: Sequence[int], base: Layout, stages: Sequence[ZeroStage] = (0, 1, 2, 3)) -> Iterator[Layout]:
    """Every (tp, pp, dp) whose product is one of `sizes`, for each ZeRO stage, with the other fields of `base`."""
    for world in sizes:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        for tp in divisors:
            for pp in (d for d in divisors if world // tp % d == 0):
                for zero in stages:
                    yield reshaped(base, tp, pp, world // (tp * pp), zero)


def reshaped(base: Layout, tp: int, pp: int, dp: int, zero: ZeroStage) -> Layout:
    """`base` with other degrees; its replicas and its split of layers stay where they still fit."""
    replicas = base.dp_replicate if dp % base.dp_replicate == 0 else 1
    split = base.stage_layers if len(base.stage_layers) == pp else ()
    return replace(base, tp=tp, pp=pp, cp=1, dp=dp, dp_replicate=replicas, zero=zero, stage_layers=split)


def batch(job: Job, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [global batch, sequence] of a step: random, some labels ignored, those of the
    first quarter of the batch wholly so, so that there are microbatches and ranks without a single valid token."""
    generator = torch.Generator().manual_seed((job.run.seed * 1000 + step) % 2**63)
    shape = (job.batch.global_batch, job.batch.sequence + 1)
    drawn = torch.randint(0, job.model.vocab, shape, generator=generator)
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[: job.batch.global_batch // 4] = -100
    return tokens, labels


def documents(job: Job, step: int) -> Tensor | None:
    """Numbers of documents [global batch, sequence] of a step, a new one at every fifth token or so, where `job` keeps
    attention within documents."""
    if not job.data.document_attention:
        return None
    generator = torch.Generator().manual_seed((job.run.seed * 1000 + step + 500) % 2**63)
    begins = torch.rand((job.batch.global_batch, job.batch.sequence), generator=generator) < 0.2
    return begins.cumsum(1)


def share(rows: Tensor, job: Job, dp_rank: int) -> Tensor:
    """The part [microbatches, micro-batch, sequence] of a global batch that a data-parallel rank takes."""
    mine = rows.chunk(job.parallel.dp)[dp_rank]
    return mine.view(-1, job.batch.micro_batch, job.batch.sequence)


def run_rank(rank: int, job: Job, sabotage: Sabotage | None = None) -> RankRun:
    """Run the steps of `job` that are judged, as one of its ranks; within `sabotage`, where one is given, which breaks
    the engine."""
    with sabotage() if sabotage else nullcontext():
        return _run_rank(rank, job)


def _run_rank(rank: int, job: Job) -> RankRun:
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    losses, norms, gradients = [], [], []
    for step in range(judged_steps(job)):
        tokens, labels = (share(rows, job, comm.coord.dp) for rows in batch(job, step))
        numbers = documents(job, step)
        shared = share(numbers, job, comm.coord.dp) if numbers is not None else None
        engine.accumulate(tokens, labels, shared, step * job.batch.global_batch)
        summed = engine.sum_gradients()
        gradients.append({name: (engine.buckets[name].held[0], _array(g)) for name, g in summed.items()})
        result = engine.update(summed, job.optimizer.lr)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    weights = {name: (bucket.held[0], _array(bucket.master)) for name, bucket in engine.buckets.items()}
    return RankRun(tuple(losses), tuple(norms), tuple(gradients), weights, engine.disagreements())


def judged_steps(job: Job) -> int:
    """Steps by which `job` is judged: AdamW amplifies the rounding of the first."""
    return STEPS if job.run.precision == "fp64" else 1


def single(job: Job) -> Job:
    """`job` on one process, one sequence at a time, with the plainest layout."""
    return replace(job, parallel=Layout(zero=0), batch=replace(job.batch, micro_batch=1))


def reference(job: Job, pool: Pool) -> Reference:
    """The single process's run of `job`."""
    alone = single(job)
    (run,) = pool.run(run_rank, 1, alone)

    def named(pieces: Pieces) -> dict[str, Array]:
        return {local.parameter.name: values.reshape(local.shape) for local, _, values in _pieces(alone, 0, pieces)}

    return Reference(run.losses, run.norms, tuple(named(g) for g in run.gradients), named(run.weights))


def judge(job: Job, runs: Sequence[RankRun], ref: Reference) -> Verdict:
    """The verdict of law 1 on what the ranks of `job` did, in fp64 or fp32."""
    precision = job.run.precision
    steps = judged_steps(job)
    worst, parameter = 0.0, ""
    for step in range(steps):
        errors = relative_errors(job, [run.gradients[step] for run in runs], ref.gradients[step])
        name = max(errors, key=lambda n: _rank_nan(errors[n]))
        if _rank_nan(errors[name]) >= worst:
            worst, parameter = errors[name], name
        if not worst <= GRADIENT_LIMIT[precision]:
            # Later steps start from wrong weights, and would blame parameters that only follow.
            break
    weight_errors = relative_errors(job, [run.weights for run in runs], ref.weights)
    for name in _without_gradient(ref):
        del weight_errors[name]
    heaviest = max(weight_errors, key=lambda n: _rank_nan(weight_errors[n]))
    weight = weight_errors[heaviest]
    loss = max(_relative(run.losses[s], ref.losses[s]) for run in runs for s in range(steps))
    norm = max(_relative(run.norms[s], ref.norms[s]) for run in runs for s in range(steps))
    limit = GRADIENT_LIMIT[precision]
    passed = worst <= limit and loss <= LOSS_LIMIT[precision] and norm <= limit
    # AdamW amplifies rounding, so weights are bounded in fp64 only.
    if precision == "fp64" and not weight <= WEIGHT_LIMIT:
        passed, parameter = False, parameter if worst > limit else heaviest
    if passed and runs[0].disagreements:
        passed, parameter = False, runs[0].disagreements[0]
    return Verdict(job.parallel, precision, worst, parameter, weight, loss, norm, passed)


def judge_bf16(job: Job, runs: Sequence[RankRun], ref: Reference, alone: Reference) -> Verdict:
    """bf16: the distance of the first step's gradient to the fp32 reference `ref`, as a multiple of the single
    process's (`alone`) distance; the multiple may be BF16_RATIO."""
    own = _distance({n: alone.gradients[0][n] - g for n, g in ref.gradients[0].items()}.values())
    squares = squared_errors(job, [run.gradients[0] for run in runs], ref.gradients[0])
    ratio = math.sqrt(sum(squares.values())) / own
    name = max(squares, key=lambda n: squares[n])
    loss = max(_relative(run.losses[0], ref.losses[0]) for run in runs)
    norm = max(_relative(run.norms[0], ref.norms[0]) for run in runs)
    differ = runs[0].disagreements
    passed = ratio <= BF16_RATIO and not differ
    return Verdict(job.parallel, "bf16", ratio, differ[0] if differ else name, math.nan, loss, norm, passed)


def relative_errors(job: Job, pieces: Sequence[Pieces], ref: Mapping[str, Array]) -> dict[str, float]:
    """‖Δ‖ ÷ max(‖reference‖, SMALL · ‖all‖) of each parameter, for its worst copy."""
    floor = SMALL[job.run.precision] * _distance(ref.values())
    squares = squared_errors(job, pieces, ref)
    return {name: math.sqrt(square) / max(_distance([ref[name]]), floor) for name, square in squares.items()}


def squared_errors(job: Job, pieces: Sequence[Pieces], ref: Mapping[str, Array]) -> dict[str, float]:
    """‖Δ‖² of each parameter, for its worst copy. Asserts that every copy of every parameter is covered exactly
    once."""
    layout = job.parallel
    grid = Grid(layout)
    squares: dict[tuple[str, object], float] = {}
    covered: dict[tuple[str, object], int] = {}
    for rank, held in enumerate(pieces):
        at = grid.coord(rank)
        data_copy = at.dp if layout.zero == 0 else at.dp // layout.dp_shard
        for local, start, values in _pieces(job, rank, held):
            wanted = _local(ref[local.parameter.name], local).reshape(-1)[start : start + values.size]
            key = (local.parameter.name, (data_copy, at.pp, at.tp % local.copies))
            squares[key] = squares.get(key, 0.0) + float(np.square(values - wanted).sum())
            covered[key] = covered.get(key, 0) + values.size
    parameters = decoder(job.model).parameters
    worst: dict[str, float] = {}
    for (name, copy), square in squares.items():
        parameter = parameters[name]
        rows = layout.tp if parameter.cut == 0 and parameter.pieces == 0 else 1
        size = parameter.numel // parameter.shape[0] * -(-parameter.shape[0] // rows) * rows
        assert covered[name, copy] == size, f"{name}: {covered[name, copy]} of {size} elements on copy {copy}"
        worst[name] = max(worst.get(name, 0.0), square, key=_rank_nan)
    assert worst.keys() == ref.keys(), f"missing parameters: {sorted(ref.keys() - worst.keys())}"
    return worst


def _without_gradient(ref: Reference) -> list[str]:
    """Parameters whose gradient is rounding alone, such as a bias on keys without rotary positions, which shifts all
    scores of a query alike. AdamW makes steps of that rounding, so their weights say nothing; their gradients do.
    """
    floors = [SMALL["fp64"] * _distance(step.values()) for step in ref.gradients]
    return [
        name
        for name in ref.gradients[0]
        if all(_distance([step[name]]) <= floor for step, floor in zip(ref.gradients, floors, strict=True))
    ]


def _pieces(job: Job, rank: int, held: Pieces) -> Iterator[tuple[LocalParameter, int, Array]]:
    """(local parameter, first of its flattened elements, values) for each stretch of a parameter in `held`."""
    at = Grid(job.parallel).coord(rank)
    buckets, _ = job_buckets(job, at.pp, at.tp)
    for name, (start, values) in held.items():
        for entry in buckets[name].entries:
            first, last = max(entry.offset, start), min(entry.stop, start + values.size)
            if first < last:
                yield entry.local, first - entry.offset, values[first - start : last - start]


def _local(whole: Array, local: LocalParameter) -> Array:
    """The slice of a global array that `local` covers, zero where it is padded."""
    out = np.zeros(local.shape)
    out[tuple(slice(0, stop - start) for start, stop in local.box)] = whole[tuple(slice(*ends) for ends in local.box)]
    return out


def _array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy().copy()


def _distance(arrays: Iterable[Array]) -> float:
    return math.sqrt(sum(float(np.square(a).sum()) for a in arrays))


def _relative(value: float, wanted: float) -> float:
    return abs(value - wanted) / max(abs(wanted), 1e-300)


def _rank_nan(error: Any) -> float:
    """A NaN is the worst error of all."""
    return math.inf if math.isnan(error) else float(error)
