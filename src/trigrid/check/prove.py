"""The real training program of one rank of a job of any size, on a process group without peers and tensors without
data.

The engine, the schedule and the optimizer are those of `trigrid train`; only the process group (torch's "fake"
backend) and the tensors (FakeTensorMode) differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from trigrid.blueprint.parameters import LocalParameter
from trigrid.check.census import Census
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.errors import Problem, Refused
from trigrid.grid import grid_of
from trigrid.ledger import STATE
from trigrid.models.build import build_engine
from trigrid.plan.state import rank_state
from trigrid.plan.traffic import step_traffic
from trigrid.report.console import table
from trigrid.report.host import peak_resident_bytes
from trigrid.spec.job import Job


class DryComm(Comm):
    """Values read on the host do not exist in a dry run; zeros stand for a finite gradient that is not clipped."""

    def read(self, tensor: Tensor) -> list[float]:
        return [0.0] * tensor.numel()


@dataclass(frozen=True)
class Line:
    """A figure, predicted in closed form and counted in the program."""

    name: str
    predicted: int
    traced: int


@dataclass(frozen=True)
class Proof:
    """What one rank's second step did. state: bytes between steps by category; calls and payload: by axis and kind.

    peak_state: largest bytes of each category while a unit ran; survivors: units whose weights outlived being given up.
    """

    rank: int
    role: str
    world: int
    state: tuple[Line, ...]
    calls: tuple[Line, ...]
    payload: tuple[Line, ...]
    peak_state: Mapping[str, int]
    survivors: tuple[str, ...]
    cpu_s: float
    host_bytes: int

    @property
    def holds(self) -> bool:
        equal = all(line.predicted == line.traced for line in (*self.state, *self.calls, *self.payload))
        return equal and not self.survivors

    def __str__(self) -> str:
        state = [
            [line.name, *map(_size, (line.predicted, line.traced, self.peak_state.get(line.name, 0))), _mark(line)]
            for line in self.state
        ]
        total = [sum(getattr(line, side) for line in self.state) for side in ("predicted", "traced")]
        state.append(["total", *map(_size, total), "", ""])
        traffic = [
            [
                calls.name,
                f"{calls.predicted:,}",
                f"{calls.traced:,}",
                _size(payload.predicted),
                _size(payload.traced),
                _mark(calls) or _mark(payload),
            ]
            for calls, payload in zip(self.calls, self.payload, strict=True)
        ]
        kept = f"\nstill alive after being given up: {', '.join(self.survivors)}" if self.survivors else ""
        return (
            f"rank {self.rank} of {self.world}: {self.role}\n\n"
            f"{table(['state', 'predicted', 'traced', 'peak in step', ''], state)}\n\n"
            f"{table(['traffic of a step', 'calls', 'traced', 'payload', 'traced', ''], traffic)}{kept}\n\n"
            f"{'predicted = traced' if self.holds else 'predicted and traced DIFFER'}"
            f" ({self.cpu_s:.1f} CPU-s, {_size(self.host_bytes)} of this host)"
        )


def prove(job: Job, rank: int | None = None) -> Proof:
    """Run two steps of `rank` of `job` (by default one in the middle of the pipeline) and count the second."""
    assert not dist.is_initialized(), "a dry run needs a process of its own"
    grid = grid_of(job)
    if rank is not None and not 0 <= rank < grid.world:
        legal = (min(max(rank, 0), grid.world - 1),)
        raise Refused([Problem("--rank", rank, f"must be from 0 to {grid.world - 1}", legal)])
    if rank is None:
        rank = grid.rank(grid.coord(0)._replace(pp=job.parallel.pp // 2))
    begun = time.process_time()
    dist.init_process_group("fake", rank=rank, world_size=grid.world, store=FakeStore())
    try:
        with FakeTensorMode():
            comm = DryComm(grid, rank)
            engine = build_engine(job, comm, torch.device("cpu"), _empty)
            census = Census(engine)
            shape = (job.batch.microbatches(job.parallel), job.batch.micro_batch, job.batch.sequence)
            tokens = torch.zeros(shape, dtype=torch.int64)
            numbers = tokens if job.data.document_attention else None
            # The first step only brings what is made lazily, such as the optimizer's moments: one microbatch is enough,
            # but for a schedule of a file, which has a number of its own.
            few = len(tokens) if job.parallel.schedule_file else 1
            engine.step(tokens[:few], tokens[:few], job.optimizer.lr, numbers[:few] if numbers is not None else None, 0)
            comm.traffic.clear()
            engine.step(tokens, tokens, job.optimizer.lr, numbers, 0)
            return _proof(job, engine, census, time.process_time() - begun)
    finally:
        dist.destroy_process_group()


def _empty(local: LocalParameter) -> Tensor:
    return torch.empty(local.shape)


def _proof(job: Job, engine: Engine, census: Census, cpu_s: float) -> Proof:
    comm = engine.comm
    wanted, held = rank_state(job, comm.rank), engine.live_bytes()
    planned = step_traffic(job, comm.rank)
    traced = {(t.axis, t.kind): (n, comm.traffic.payload_bytes[t]) for t, n in comm.traffic.calls.items()}
    keys = sorted(planned.keys() | traced.keys())
    units = [unit.name for stage in engine.stages.values() for unit in stage.units]
    at = comm.coord
    return Proof(
        rank=comm.rank,
        role=f"dp {at.dp}, stage {at.pp} ({units[0]} … {units[-1]}), tp {at.tp}",
        world=comm.grid.world,
        state=tuple(Line(name, wanted[name], held[name]) for name in STATE),
        calls=tuple(Line(" ".join(k), planned.get(k, (0, 0))[0], traced.get(k, (0, 0))[0]) for k in keys),
        payload=tuple(Line(" ".join(k), planned.get(k, (0, 0))[1], traced.get(k, (0, 0))[1]) for k in keys),
        peak_state=census.peak,
        survivors=tuple(sorted(census.survivors)),
        cpu_s=cpu_s,
        host_bytes=peak_resident_bytes(),
    )


def _size(n: int) -> str:
    """Bytes in the largest unit that leaves at least one before the point."""
    power, unit = next((p, u) for p, u in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")) if n >= 2**p or not p)
    return f"{n / 2**power:,.3f} {unit}" if power else f"{n} B"


def _mark(line: Line) -> str:
    return "" if line.predicted == line.traced else "DIFFERS"
