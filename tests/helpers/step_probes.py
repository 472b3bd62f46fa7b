"""More of what tests run inside worker processes: single phases of a step, and bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from trigrid.check.parity import Pieces, batch, share
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.errors import RunFailed
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.spec.job import Job
from trigrid.train.training import check_copies


@dataclass(frozen=True)
class Bits:
    """Losses and norms of each step, and the bytes of every weight that the rank holds after the last."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: tuple[bytes, ...]


def bits(
    rank: int, job: Job, steps: int = 3, within: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Bits:
    with within():
        engine = engine_of(rank, job)
        results = [engine.step(*rows_of(engine, step), 1e-2) for step in range(steps)]
        losses, norms = tuple(r.loss for r in results), tuple(r.gradient_norm for r in results)
        return Bits(losses, norms, tuple(as_bytes(bucket.master) for bucket in engine.buckets.values()))


@contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """What torch.empty returns holds NaN, and the largest number where it is whole."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def initial_weights(rank: int, job: Job) -> Pieces:
    """What the rank holds before the first step."""
    engine = engine_of(rank, job)
    return {name: (bucket.held[0], bucket.master.double().numpy()) for name, bucket in engine.buckets.items()}


def gradients_around_an_evaluation(rank: int, job: Job, evaluate: bool) -> tuple[list[bytes], float, list[bytes]]:
    """Gradients, norm and weights of a step, with or without validations of other shapes between its phases."""
    engine = engine_of(rank, job)
    tokens, labels = rows_of(engine, 0)

    def disturb() -> None:
        if evaluate:
            for length in (job.batch.sequence // 2, job.batch.sequence, job.batch.sequence // 4):
                other = rows_of(engine, 7)
                engine.evaluate(*(rows[:1, :1, :length].contiguous() for rows in other))

    disturb()
    engine.accumulate(tokens, labels)
    disturb()
    gradients = engine.sum_gradients()
    found = [as_bytes(gradient) for gradient in gradients.values()]
    disturb()
    norm = engine.update(gradients, 1e-2).gradient_norm
    return found, norm, [as_bytes(bucket.master) for bucket in engine.buckets.values()]


def many_steps(rank: int, job: Job, steps: int) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Losses of `steps` steps, and weights whose copies then differ."""
    engine = engine_of(rank, job)
    losses = tuple(engine.step(*rows_of(engine, step), 1e-2).loss for step in range(steps))
    return losses, engine.disagreements()


def out_of_step(rank: int, job: Job, culprit: int, step: int, rate: float, consumed: int) -> str:
    """What the check of copies says when `culprit` believes to be at `step`, `rate` and sample `consumed`, and all
    others at the first step."""
    engine = engine_of(rank, job)
    try:
        check_copies(engine, *((step, rate, consumed) if rank == culprit else (1, 1e-3, 0)))
    except RunFailed as failed:
        return str(failed)
    return ""


def engine_of(rank: int, job: Job) -> Engine:
    return build_engine(job, Comm(grid_of(job), rank), torch.device("cpu"))


def rows_of(engine: Engine, step: int) -> tuple[Tensor, Tensor]:
    """The rank's tokens and labels of a step."""
    tokens, labels = batch(engine.job, step)
    return share(tokens, engine.job, engine.comm.coord.dp), share(labels, engine.job, engine.comm.coord.dp)


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def told_of_shapes(rank: int, job: Job, culprit: int, shape: tuple[int, int, int]) -> list[str]:
    """What a step and a validation say when `culprit` has a batch of `shape`, and all others the job's."""
    engine = engine_of(rank, job)
    m, b, s = shape if rank == culprit else rows_of(engine, 0)[0].shape
    rows = [part[:m, :b, :s].contiguous() for part in rows_of(engine, 0)]
    told = []
    for act in (lambda: engine.step(*rows, 1e-3), lambda: engine.evaluate(*rows)):
        try:
            act()
        except RunFailed as failed:
            told.append(str(failed))
    assert len(told) == 2
    return told
