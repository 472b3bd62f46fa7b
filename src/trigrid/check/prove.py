"""The real training program of one rank of a job of any size, on a process group without peers and tensors without
data.

The engine, the schedule and the optimizer are those of `trigrid train`; only the process group (torch's "fake"
backend) and the tensors (FakeTensorMode) differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from trigrid.blueprint.parameters import LocalParameter
from trigrid.check.census import Census
from trigrid.check.dry import DryComm, PeerComm, attach, label_state
from trigrid.check.operations import KINDS, Operations, step_flops
from trigrid.check.parity import batch, documents, share
from trigrid.check.roles import Role, places
from trigrid.check.tracing import (
    ACTIVATIONS,
    INPUTS,
    LOGITS,
    MESSAGES,
    QUEUE,
    TRANSIENT,
    Holding,
    Sample,
    Tracer,
)
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.engine.zero import Initialise
from trigrid.grid import Grid, grid_of
from trigrid.ledger import STATE
from trigrid.models.build import build_engine
from trigrid.plan.backend import backend_of
from trigrid.plan.memory import StageUse
from trigrid.plan.plan import Plan, make_plan
from trigrid.plan.software import Software, engine_software
from trigrid.plan.state import rank_state
from trigrid.plan.traffic import step_traffic
from trigrid.report.host import peak_resident_bytes
from trigrid.spec.job import Job

NEAR = 0.03
"""Law 2: how far the predicted peak may be from the traced one."""
COUNTER_BYTES = 4
"""The optimizer's number of updates, of each run of weights."""
SCALARS_BYTES = 1024
"""What may outlive a step: its loss, flags."""
SMALL = 0.001
"""Of the peak: a category that is off by less than this is not marked."""


@dataclass(frozen=True)
class Line:
    """A figure, predicted in closed form and counted in the program."""

    name: str
    predicted: int
    traced: int

    @property
    def equal(self) -> bool:
        return self.predicted == self.traced

    @property
    def off(self) -> float:
        """How far the prediction is from the trace, as a share of the larger of the two; above what was traced it is
        positive."""
        return (self.predicted - self.traced) / max(self.predicted, self.traced, 1)

    @property
    def near(self) -> bool:
        return abs(self.predicted - self.traced) <= NEAR * self.traced


@dataclass(frozen=True)
class Peak:
    """The moment of a step when most is allocated.

    action, unit: in which it is; planned: the planner's name of its moment; memory: bytes by category as the planner
    has them; parts: traced bytes of the transients by kind; holdings: the largest groups of storages alike; by_action:
    (stage, microbatch) whose activations are held.
    """

    action: str
    unit: str
    planned: str
    memory: tuple[Line, ...]
    total: Line
    parts: Mapping[str, int]
    holdings: tuple[Holding, ...]


@dataclass(frozen=True)
class Proof:
    """What one rank's second step did. state: bytes between steps by category; calls and payload: by axis and kind;
    flops: of the step by kind, from its first microbatches.

    alike: pipeline ranks that it stands for. peak_state: largest bytes of each category of state while a unit ran;
    survivors: units whose weights outlived being given up; left_over: bytes by category that outlived the step and are
    neither state nor inputs; samples: memory of each action.
    """

    rank: int
    role: str
    world: int
    pp: int
    alike: str
    state: tuple[Line, ...]
    calls: tuple[Line, ...]
    payload: tuple[Line, ...]
    flops: tuple[Line, ...]
    peak: Peak
    peak_state: Mapping[str, int]
    survivors: tuple[str, ...]
    left_over: Mapping[str, int]
    samples: tuple[Sample, ...]
    cpu_s: float
    host_bytes: int

    @property
    def holds(self) -> bool:
        """Whether state, communication and operations are what was predicted, the peak is near it, and what was given
        up died."""
        equal = all(line.equal for line in (*self.state, *self.calls, *self.payload, *self.flops))
        return equal and self.peak.total.near and not self.survivors and not self.left_over


def prove(job: Job, roles: Sequence[Role], say: Callable[[str], None] = lambda _: None) -> list[Proof]:
    """Run two steps of the rank of each of `roles`, one after the other, and count the second."""
    planned = make_plan(job, program_software(job))
    proofs = []
    for role in roles:
        say(f"rank {role.rank:,} of {job.parallel.world:,}: two steps, of which the second counts")
        proofs.append(prove_rank(job, role, planned))
    return proofs


def program_software(job: Job) -> Software:
    """The engine as a dry run has it: on the CPU a norm is written out, which is one kernel on CUDA."""
    software = engine_software(job)
    if job.parallel.schedule == "auto" or job.model.block != "llama":
        # A schedule is made from times, which must be those that the job's own is made from.
        return software
    return replace(software, kernels=replace(software.kernels, fused_norm=False))


def prove_rank(job: Job, role: Role, planned: Plan) -> Proof:
    """The proof of one rank, without its peers and without data; planned: the plan of `job`."""
    assert not dist.is_initialized(), "a dry run needs a process group of its own"
    dist.init_process_group("fake", rank=role.rank, world_size=job.parallel.world, store=FakeStore())
    try:
        with FakeTensorMode():
            return trace(job, role, planned, partial(DryComm, stands_for=backend_of(job)), _empty)
    finally:
        dist.destroy_process_group()


def trace_rank(rank: int, job: Job, planned: Plan) -> Proof:
    """The same of a rank among its peers, with data, over the process group that it has joined."""
    pp = grid_of(job).coord(rank).pp
    return trace(job, Role(rank, pp, (pp,)), planned, PeerComm)


def trace(
    job: Job,
    role: Role,
    planned: Plan,
    comm_of: Callable[[Grid, int, Tracer], Comm],
    initialise: Initialise | None = None,
) -> Proof:
    """Two steps of one rank and what the second did, whatever the process group and the tensors are. Where the job
    compiles blocks, this is what is compiled."""
    job = replace(job, run=replace(job.run, compile=False))
    begun = time.process_time()
    with Tracer() as tracer:
        comm = comm_of(grid_of(job), role.rank, tracer)
        engine = build_engine(job, comm, torch.device("cpu"), initialise)
        census = Census(engine)
        attach(tracer, engine)
        tokens, labels, numbers = _rows(job, comm.coord.dp)
        # The first step brings what is made lazily, and is counted in operations, apart from memory: one microbatch
        # is like the others, but a schedule of a file has a number of its own.
        few = len(tokens) if job.parallel.schedule_file else 1
        operations = Operations([*engine.buckets.values()], lambda: comm.activity.action)
        with operations:
            engine.step(tokens[:few], labels[:few], job.optimizer.lr, numbers[:few] if numbers is not None else None, 0)
        comm.traffic.clear()
        label_state(tracer, engine)
        tracer.restart()
        engine.step(tokens, labels, job.optimizer.lr, numbers, 0)
        tracer.finish()
        counted = {kind: n * len(tokens) // few for kind, n in operations.flops.items()}
        return _proof(job, role, engine, census, tracer, planned, counted, time.process_time() - begun)


def _rows(job: Job, dp: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, labels and numbers of documents of a data-parallel rank, in storages of their own."""
    numbers = documents(job, 0)
    tokens, labels = (share(rows, job, dp).clone() for rows in batch(job, 0))
    return tokens, labels, share(numbers, job, dp).clone() if numbers is not None else None


def _empty(local: LocalParameter) -> Tensor:
    return torch.empty(local.shape)


def _proof(
    job: Job,
    role: Role,
    engine: Engine,
    census: Census,
    tracer: Tracer,
    planned: Plan,
    counted: Mapping[str, int],
    cpu_s: float,
) -> Proof:
    comm, at = engine.comm, engine.comm.coord
    wanted, held = rank_state(job, comm.rank), engine.live_bytes()
    moved = step_traffic(job, comm.rank)
    traced = {(t.axis, t.kind): (n, comm.traffic.payload_bytes[t]) for t, n in comm.traffic.calls.items()}
    keys = sorted(moved.keys() | traced.keys())
    flops = step_flops(job, at.pp, at.tp)
    units = [unit.name for stage in engine.stages.values() for unit in stage.units]
    state = tuple(Line(name, wanted[name], held[name]) for name in STATE)
    return Proof(
        rank=comm.rank,
        role=f"dp {at.dp}, stage {at.pp} ({units[0]} … {units[-1]}), tp {at.tp}",
        world=comm.grid.world,
        pp=at.pp,
        alike=places(role.alike),
        state=state,
        calls=tuple(Line(" ".join(k), moved.get(k, (0, 0))[0], traced.get(k, (0, 0))[0]) for k in keys),
        payload=tuple(Line(" ".join(k), moved.get(k, (0, 0))[1], traced.get(k, (0, 0))[1]) for k in keys),
        flops=tuple(
            Line(kind, flops.get(kind, 0), counted.get(kind, 0)) for kind in KINDS if kind in flops or kind in counted
        ),
        peak=peak_of(state, planned.stages[at.pp].memory.use, tracer),
        peak_state=census.peak,
        survivors=tuple(sorted(census.survivors)),
        left_over=_left_over(tracer.samples[-1], engine),
        samples=tuple(tracer.samples),
        cpu_s=cpu_s,
        host_bytes=peak_resident_bytes(),
    )


def _left_over(last: Sample, engine: Engine) -> dict[str, int]:
    few = SCALARS_BYTES + COUNTER_BYTES * sum(len(bucket.held_runs()) for bucket in engine.buckets.values())
    return {name: n for name, n in last.left.bytes.items() if name not in (*STATE, INPUTS) and n > few}


def peak_of(state: Sequence[Line], use: StageUse, tracer: Tracer) -> Peak:
    """The step's fullest moment beside what the planner says of the stage."""
    fullest = max(tracer.samples, key=lambda sample: sample.peak.total_bytes)
    there = fullest.peak
    pairs = (
        ("activations", use.activations, there[ACTIVATIONS] + there[QUEUE]),
        ("logits", use.logits, there[LOGITS]),
        ("messages", use.buffers, there[MESSAGES]),
        ("transients", use.transients, sum(there[name] for name in TRANSIENT)),
        ("inputs", use.inputs, there[INPUTS]),
    )
    memory = (
        *(Line(line.name, line.predicted, there[line.name]) for line in state),
        *(Line(name, round(predicted), traced) for name, predicted, traced in pairs),
    )
    return Peak(
        action=str(fullest.action),
        unit=fullest.unit,
        planned=use.moment,
        memory=memory,
        total=Line("peak", sum(line.predicted for line in memory), there.total_bytes),
        parts={name: there[name] for name in TRANSIENT if there[name]},
        holdings=tracer.holdings[:24],
    )
