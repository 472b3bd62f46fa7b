"""One rank's engine: stage, buckets, pipeline and optimizer, and the step that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from trigrid.blueprint import Unit, decoder
from trigrid.blueprint.buckets import stage_buckets
from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.agreement import disagreements
from trigrid.engine.comm import Comm
from trigrid.engine.finish import ShardOptimizer, StepResult, sum_gradients, update
from trigrid.engine.pipeline import Pipeline
from trigrid.engine.units import Microbatch, RunUnit, Stage, UnitFunction
from trigrid.engine.zero import TORCH_DTYPE, Bucket, Dtypes, Initialise
from trigrid.ledger import Ledger
from trigrid.schedule import Kind, Schedule, make_schedule, validate
from trigrid.schedule.generators import forward_only
from trigrid.spec.job import Job
from trigrid.spec.layout import zero_policy
from trigrid.spec.precision import PRECISIONS

BuildUnit = Callable[[Unit, Mapping[str, LocalParameter]], UnitFunction]
"""(unit, its local parameters by role) → the function that computes it."""


class Engine:
    """Trains the part of a model that one rank holds.

    `build` gives the function of each unit, `initialise` the first value of each local parameter.
    """

    def __init__(self, job: Job, comm: Comm, device: torch.device, build: BuildUnit, initialise: Initialise):
        layout = job.parallel
        precision = PRECISIONS[job.run.precision]
        self.job = job
        self.comm = comm
        self.device = device
        units = decoder(job.model).stage(layout, comm.coord.pp)
        layouts, places = stage_buckets(units, layout, comm.coord.tp)
        policy = zero_policy(layout)
        self.buckets = {
            name: Bucket(bucket, policy, Dtypes.of(precision), comm, device, initialise)
            for name, bucket in layouts.items()
        }
        run_units = []
        for placed in places:
            roles = [
                (parameter.role, self.buckets[bucket], index)
                for parameter, (bucket, index) in zip(placed.unit.parameters, placed.places, strict=True)
            ]
            locals_ = {role: bucket.layout.entries[index].local for role, bucket, index in roles}
            function = build(placed.unit, locals_)
            run_units.append(RunUnit(placed.unit.name, function, roles, layout.recompute == "full"))
        self.stage = Stage(run_units)
        dtype = TORCH_DTYPE[precision.compute]
        self._pipeline = Pipeline({comm.coord.pp: self.stage}, comm, dtype, device)
        self._optimizer = ShardOptimizer(self.buckets, job.optimizer)
        self._loss = torch.zeros((), device=device)

    def step(self, tokens: Tensor, labels: Tensor, lr: float, documents: Tensor | None = None) -> StepResult:
        """One optimizer step on this rank's tokens, labels and numbers of documents, each
        [microbatches, micro-batch, sequence]."""
        self.accumulate(tokens, labels, documents)
        return self.update(self.sum_gradients(), lr)

    def accumulate(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> None:
        """Forward and backward of every microbatch."""
        microbatches = self._microbatches(tokens, labels, documents)
        for bucket in self.buckets.values():
            users = sum(bucket in unit.buckets for unit in self.stage.units)
            bucket.start_step(users * len(microbatches))
        schedule = _schedule(self.job.parallel.schedule, self.job.parallel.pp, len(microbatches))
        self._loss = self._pipeline.run(schedule, microbatches, self._boundary(tokens))

    def sum_gradients(self) -> dict[str, Tensor]:
        """After `accumulate`: complete gradients of what this rank holds of each bucket."""
        return sum_gradients(self.buckets, self.comm)

    def update(self, gradients: Mapping[str, Tensor], lr: float) -> StepResult:
        """After `sum_gradients`: norm, guard, clip, AdamW and new weights."""
        clip = self.job.optimizer.clip_norm
        return update(self.buckets, gradients, self._loss, self._optimizer, self.comm, lr, clip)

    def evaluate(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> float:
        """Mean loss over the valid tokens of all ranks, without gradients."""
        microbatches = self._microbatches(tokens, labels, documents)
        schedule = _schedule("forward", self.job.parallel.pp, len(microbatches))
        loss = self._pipeline.run(schedule, microbatches, self._boundary(tokens)).double()
        for bucket in self.buckets.values():
            bucket.release()
        mine = loss if self.comm.coord.tp == 0 else torch.zeros_like(loss)
        return self.comm.read(self.comm.all_reduce(mine.reshape(1), "world"))[0]

    def disagreements(self) -> tuple[str, ...]:
        """Parameters whose copies differ between ranks, see `agreement`."""
        return disagreements(self.buckets, self.comm)

    def live_bytes(self) -> Ledger:
        """State alive now on this rank, by category, from live storages."""
        total = Ledger({"optimizer": self._optimizer.live_bytes()})
        for bucket in self.buckets.values():
            total += bucket.live_bytes()
        return total

    def _microbatches(self, tokens: Tensor, labels: Tensor, documents: Tensor | None) -> list[Microbatch]:
        labels = labels.to(self.device)
        valid = self.comm.all_reduce((labels >= 0).sum().double().reshape(1), "batch")
        scale = valid.clamp(min=1.0).reciprocal().squeeze(0)

        def sequence_first(rows_MBS: Tensor) -> list[Tensor]:
            return [rows_BS.t().contiguous() for rows_BS in rows_MBS.to(self.device)]

        numbers = sequence_first(documents) if documents is not None else [None] * len(tokens)
        parts = zip(sequence_first(tokens), sequence_first(labels), numbers, strict=True)
        return [Microbatch(t, at, scale, of) for t, at, of in parts]

    def _boundary(self, tokens: Tensor) -> tuple[int, int, int]:
        _, rows, sequence = tokens.shape
        layout = self.job.parallel
        cut = layout.tp if layout.sequence_parallel else 1
        return sequence // cut, rows, self.job.model.hidden


@lru_cache(maxsize=8)
def _schedule(name: str, pp: int, microbatches: int) -> Schedule:
    if name == "forward":
        schedule = forward_only(pp, microbatches)
        validate(schedule, (Kind.FORWARD,))
    else:
        schedule = make_schedule(name, pp, microbatches)
        validate(schedule)
    return schedule
