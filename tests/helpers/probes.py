"""What tests run inside worker processes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trigrid.check.census import Census
from trigrid.check.parity import batch, share
from trigrid.engine.comm import Comm
from trigrid.engine.finish import StepResult
from trigrid.engine.zero import Bucket
from trigrid.grid import grid_of
from trigrid.ledger import Ledger
from trigrid.models.build import build_engine
from trigrid.spec.job import Job


@dataclass(frozen=True)
class Seen:
    """state after a step, peaks within it, the traffic of the second step, the largest bucket, units that survived."""

    state: Ledger
    peak: dict[str, int]
    traffic: dict[tuple[str, str], tuple[int, int]]
    volume_bytes: int
    stage_numel: int
    largest_numel: int
    survivors: set[str]


def watch(rank: int, job: Job, hoarder: str = "") -> Seen:
    """Two steps of one rank, and what they held and moved. The unit `hoarder` keeps a view of one of its weights."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    census = Census(engine)
    hoard = []
    for unit in (unit for stage in engine.stages.values() for unit in stage.units):
        if unit.name == hoarder:
            function = unit._function
            unit._function = lambda w, x, mb, function=function: hoard.append(w["o"].detach()) or function(w, x, mb)
    for step in range(2):
        comm.traffic.clear()
        engine.step(*(share(rows, job, comm.coord.dp) for rows in batch(job, step)), 1e-3)
    sizes = [bucket.layout.numel for bucket in engine.buckets.values()]
    return Seen(
        engine.live_bytes(),
        census.peak,
        {(t.axis, t.kind): (n, comm.traffic.payload_bytes[t]) for t, n in comm.traffic.calls.items()},
        comm.traffic.volume_bytes("zero"),
        sum(sizes),
        max(sizes),
        census.survivors,
    )


@dataclass(frozen=True)
class Guarded:
    """What became of the bad step and of the one after it; whether weights were unchanged by the bad one, and whether
    the one after it was, bit for bit, that of a run without a bad one (so the moments were unchanged too)."""

    result: StepResult
    later: StepResult
    unchanged: bool
    as_if_never: bool


def poison(rank: int, job: Job, culprit: int, parameter: str, value: float) -> Guarded:
    """A good step, one in which `culprit`'s own gradient of `parameter` has one bad element, a good step; and the same
    without the bad one."""

    def run(bad: bool) -> tuple[StepResult | None, StepResult, bool, list[Tensor]]:
        comm = Comm(grid_of(job), rank)
        engine = build_engine(job, comm, torch.device("cpu"))

        def step(number: int) -> StepResult:
            return engine.step(*(share(rows, job, comm.coord.dp) for rows in batch(job, number)), 1e-3)

        step(0)
        before = _state(engine.buckets)
        result = None
        if bad:
            with _poisoned(parameter if rank == culprit else "", value):
                result = step(1)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, _state(engine.buckets), strict=True))
        return result, step(2), unchanged, _state(engine.buckets)

    result, later, unchanged, after = run(bad=True)
    assert result is not None
    _, wanted, _, undisturbed = run(bad=False)
    same = later == wanted and all(torch.equal(a, b) for a, b in zip(after, undisturbed, strict=True))
    return Guarded(result, later, unchanged, same)


def _state(buckets: dict[str, Bucket]) -> list[Tensor]:
    held = [bucket.master for bucket in buckets.values()] + [
        bucket.weights for bucket in buckets.values() if bucket.weights is not None
    ]
    return [tensor.clone() for tensor in held]


@contextmanager
def _poisoned(parameter: str, value: float) -> Iterator[None]:
    close = Bucket.close_gradients

    def bad(self: Bucket) -> None:
        whole = self._gradients if self._transient is None else self._transient
        for entry in self.layout.entries:
            if entry.local.parameter.name == parameter:
                whole[entry.stop - 1] = value
        close(self)

    with patch.object(Bucket, "close_gradients", bad):
        yield


def evaluate_between(rank: int, job: Job) -> tuple[list[float], list[float]]:
    """Losses of three steps, and of the same three steps with a validation before each."""
    losses: list[list[float]] = []
    for validating in (False, True):
        comm = Comm(grid_of(job), rank)
        engine = build_engine(job, comm, torch.device("cpu"))
        losses.append([])
        for step in range(3):
            rows = [share(rows, job, comm.coord.dp) for rows in batch(job, step)]
            if validating:
                engine.evaluate(*(part[:1] for part in rows))
            losses[-1].append(engine.step(rows[0], rows[1], 1e-2).loss)
    return losses[0], losses[1]


def evaluate_and_train(rank: int, job: Job) -> tuple[float, float]:
    """The validation loss of a batch, and the training loss of the same batch."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    rows = [share(rows, job, comm.coord.dp) for rows in batch(job, 0)]
    return engine.evaluate(*rows), engine.step(rows[0], rows[1], 1e-2).loss


def count_unfinished_sends(rank: int, job: Job) -> int:
    """The most sends of one channel that were under way at once during a step."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    unfinished: dict[int, int] = {}
    most = 0
    isend = dist.isend

    class Counted:
        def __init__(self, work: dist.Work, to: int):
            self._work, self._to = work, to

        def wait(self) -> None:
            self._work.wait()
            unfinished[self._to] -= 1

    def counted(tensor: Tensor, dst: int, **options: Any) -> Counted:
        nonlocal most
        unfinished[dst] = unfinished.get(dst, 0) + 1
        most = max(most, unfinished[dst])
        return Counted(isend(tensor, dst, **options), dst)

    with patch.object(dist, "isend", counted):
        engine.step(*(share(rows, job, comm.coord.dp) for rows in batch(job, 0)), 1e-3)
    assert not any(unfinished.values()), unfinished
    return most


def disagree(rank: int, job: Job, culprit: int, parameter: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the check of copies finds after a step, before and after rank `culprit` changes the last bit of an element
    of `parameter`."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    engine.step(*(share(rows, job, comm.coord.dp) for rows in batch(job, 0)), 1e-3)
    before = engine.disagreements()
    for bucket in engine.buckets.values() if rank == culprit else []:
        for entry in bucket.layout.entries:
            if entry.local.parameter.name == parameter and bucket.held[0] <= entry.offset < bucket.held[1]:
                bucket.master[entry.offset - bucket.held[0]].view(torch.int64).bitwise_xor_(1)
    return before, engine.disagreements()


def changing_sequences(rank: int, job: Job, lengths: Sequence[int]) -> list[tuple[float, float]]:
    """Loss and gradient norm of steps whose sequences have one length after the other, a validation of yet another
    length between them."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    found = []
    for step, length in enumerate(lengths):
        rows = [share(rows, job, comm.coord.dp)[..., :length].contiguous() for rows in batch(job, step)]
        result = engine.step(rows[0], rows[1], 1e-2)
        engine.evaluate(*(part[:1, :, : length // 2].contiguous() for part in rows))
        found.append((result.loss, result.gradient_norm))
    return found


def bits_after_steps(rank: int, job: Job) -> list[bytes]:
    """The bytes of every loss and weight after three steps."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    losses = []
    for step in range(3):
        losses.append(engine.step(*(share(rows, job, comm.coord.dp) for rows in batch(job, step)), 1e-2).loss)
    weights = [bucket.master.view(torch.uint8).numpy().tobytes() for bucket in engine.buckets.values()]
    return [struct.pack(f"{len(losses)}d", *losses), *weights]


def flops_of_a_step(rank: int, job: Job) -> int:
    """Operations of the matrix products of a step, as torch counts them."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        engine.step(*(share(rows, job, comm.coord.dp) for rows in batch(job, 0)), 1e-3)
    return int(counter.get_total_flops())


def shared_storages(rank: int, job: Job) -> list[str]:
    """Names of the parameters that more than one stage of this rank uses."""
    engine = build_engine(job, Comm(grid_of(job), rank), torch.device("cpu"))
    users: dict[str, set[int]] = {}
    for stage, held in engine.stages.items():
        for unit in held.units:
            for bucket in unit.buckets:
                for entry in bucket.layout.entries:
                    users.setdefault(entry.local.parameter.name, set()).add(stage)
    storages = [bucket.master.untyped_storage().data_ptr() for bucket in engine.buckets.values()]
    assert len(set(storages)) == len(storages)
    return [name for name, stages in users.items() if len(stages) > 1]


def one_step_each(rank: int, jobs: Sequence[Job]) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first step of each of `jobs`, which have one layout but for their schedules."""
    comm = Comm(grid_of(jobs[0]), rank)
    found = []
    for job in jobs:
        engine = build_engine(job, comm, torch.device("cpu"))
        result = engine.step(*(share(rows, job, comm.coord.dp) for rows in batch(job, 0)), 1e-3)
        found.append((result.loss, result.gradient_norm))
    return found


def most_in_flight(rank: int, job: Job) -> tuple[int, int]:
    """The most stages times microbatches whose activations this rank keeps, and of these and what waits for weight
    backwards together, in a step."""
    engine = build_engine(job, Comm(grid_of(job), rank), torch.device("cpu"))
    blocks = [[unit for unit in stage.units if not unit.embeds] for stage in engine.stages.values()]
    most = [0, 0]

    def note() -> None:
        saved = sum(max(len(unit._saved) for unit in units) for units in blocks)
        later = sum(max(len(unit._later) for unit in units) for units in blocks)
        most[:] = max(most[0], saved), max(most[1], saved + later)

    def noting(method: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            result = method(*arguments)
            note()
            return result

        return noted

    for stage in engine.stages.values():
        for name in ("forward", "backward", "input_backward", "weight_backward"):
            setattr(stage, name, noting(getattr(stage, name)))
    engine.step(*(share(rows, job, 0) for rows in batch(job, 0)), 1e-3)
    return most[0], most[1]


def threads(rank: int) -> int:
    """Of this process, now."""
    found = len(os.listdir("/proc/self/task"))
    # Nobody may leave while others are still finding each other.
    dist.barrier()
    return found
