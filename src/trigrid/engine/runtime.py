"""One rank's engine: stage, buckets, pipeline and optimizer, and the step that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from trigrid.blueprint import Unit
from trigrid.blueprint.buckets import UnitBuckets, job_buckets, stretches
from trigrid.blueprint.decoder import TOGETHER
from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.agreement import disagreements
from trigrid.engine.comm import Comm
from trigrid.engine.finish import ShardOptimizer, StepResult, sum_gradients, update
from trigrid.engine.handover import Handover
from trigrid.engine.matmul import matmul_precision
from trigrid.engine.pipeline import Pipeline
from trigrid.engine.recorder import COMPUTE
from trigrid.engine.shapes import agree_on_shape
from trigrid.engine.units import Microbatch, Place, RunUnit, Stage, UnitFunction, joined
from trigrid.engine.zero import TORCH_DTYPE, Bucket, Dtypes, Initialise, Reducing
from trigrid.errors import RunFailed
from trigrid.ledger import Ledger
from trigrid.plan.scheduled import job_schedule
from trigrid.schedule.of_job import evaluation_schedule
from trigrid.spec.job import Job
from trigrid.spec.layout import RecomputeName, zero_policy
from trigrid.spec.precision import PRECISIONS

BuildUnit = Callable[[Unit, Mapping[str, LocalParameter], RecomputeName], UnitFunction]
"""(unit, its local parameters by role, what its stage recomputes) → the function that computes it."""


class Engine:
    """Trains the part of a model that one rank holds.

    `build` gives the function of each unit, `initialise` the first value of each local parameter. handover: from the
    products of those functions.
    """

    def __init__(
        self,
        job: Job,
        comm: Comm,
        device: torch.device,
        build: BuildUnit,
        initialise: Initialise,
        handover: Handover,
    ):
        layout = job.parallel
        precision = PRECISIONS[job.run.precision]
        self.job = job
        self.comm = comm
        self.device = device
        layouts, placed = job_buckets(job, comm.coord.pp, comm.coord.tp)
        policy = zero_policy(layout)
        reducing = Reducing()
        self.buckets = {
            name: Bucket(bucket, policy, Dtypes.of(precision), comm, device, initialise, reducing)
            for name, bucket in layouts.items()
        }
        self._trained = {name: bucket for name, bucket in self.buckets.items() if not bucket.frozen}

        def run_unit(placed: UnitBuckets, recompute: RecomputeName) -> RunUnit:
            parameters = zip(placed.unit.parameters, placed.places, strict=True)
            places = {parameter.role: Place(self.buckets[name], at, at) for parameter, (name, at) in parameters}
            locals_ = {role: bucket.layout.entries[at].local for role, (bucket, at, _) in places.items()}
            function = build(placed.unit, locals_, recompute)
            return RunUnit(placed, function, joined(places, TOGETHER), recompute == "full", handover)

        self.stages = {
            stage: Stage([run_unit(unit, layout.recompute_of(stage)) for unit in units], layout.prefetch)
            for stage, units in placed.items()
        }
        self._backwards = {
            name: sum(stretches((u for u in units if u.backward), name) for units in placed.values())
            for name in self._trained
        }
        dtype = TORCH_DTYPE[precision.compute]
        self._pipeline = Pipeline(self.stages, comm, dtype, device)
        self.optimizer = ShardOptimizer(self._trained, job.optimizer)
        self._loss = torch.zeros((), device=device)

    def step(
        self,
        tokens: Tensor,
        labels: Tensor,
        lr: float,
        documents: Tensor | None = None,
        consumed: int | None = None,
        stop: bool = False,
    ) -> StepResult:
        """One optimizer step on this rank's tokens, labels and numbers of documents, each
        [microbatches, micro-batch, sequence]; consumed as in `accumulate`, stop as in `update`."""
        self.accumulate(tokens, labels, documents, consumed)
        return self.update(self.sum_gradients(), lr, stop)

    def accumulate(
        self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None, consumed: int | None = None
    ) -> None:
        """Forward and backward of every microbatch.

        consumed: samples of all ranks before this step, after which those of this step are numbered, rank by rank
        along data parallelism; dropout needs it.
        """
        run = self.job.run
        assert consumed is not None or not (run.dropout or run.attention_dropout), "dropout goes by numbers of samples"
        microbatches = self._microbatches(tokens, labels, documents, self._samples(tokens, consumed))
        for name, bucket in self._trained.items():
            bucket.start_step(self._backwards[name] * len(microbatches))
        if run.check_copies and (left := self.left_over()):
            raise RunFailed(f"rank {self.comm.rank}: left over from the step before: {'; '.join(left[:8])}")
        schedule = job_schedule(self.job, len(microbatches))
        with matmul_precision(run.matmul_precision):
            self._loss = self._pipeline.run(schedule, microbatches, self._boundary(tokens))

    def sum_gradients(self) -> dict[str, Tensor]:
        """After `accumulate`: complete gradients of what this rank holds of each bucket."""
        self.comm.activity.act("sum gradients")
        with self._recorded("sum gradients"):
            return sum_gradients(self._trained, self.comm)

    def update(self, gradients: Mapping[str, Tensor], lr: float, stop: bool = False) -> StepResult:
        """After `sum_gradients`: norm, guard, clip, AdamW and new weights. stop: this rank has been told to stop; the
        result says whether any has."""
        self.comm.activity.act("update")
        clip = self.job.optimizer.clip_norm
        with self._recorded("update"):
            result = update(self._trained, gradients, self._loss, self.optimizer, self.comm, lr, clip, stop)
        self._release()
        return result

    def _recorded(self, kind: str) -> AbstractContextManager[None]:
        recorder = self.comm.recorder
        return recorder.span(COMPUTE, kind) if recorder else nullcontext()

    def evaluate(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> float:
        """Mean loss over the valid tokens of all ranks, without gradients."""
        microbatches = self._microbatches(tokens, labels, documents, None)
        schedule = evaluation_schedule(self.job.parallel, len(microbatches))
        with matmul_precision(self.job.run.matmul_precision):
            loss = self._pipeline.run(schedule, microbatches, self._boundary(tokens)).double()
        self._release()
        mine = loss if self.comm.coord.tp == 0 else torch.zeros_like(loss)
        return self.comm.read(self.comm.all_reduce(mine.reshape(1), "world"))[0]

    def resume(self, updates: int) -> None:
        """After what this rank holds of masters and moments was set to that of a run with so many updates: bring full
        weights up to date. Every rank must call it."""
        self.optimizer.resume(updates)
        for bucket in self.buckets.values():
            bucket.spread()

    def _release(self) -> None:
        for bucket in self.buckets.values():
            bucket.release()

    def disagreements(self) -> tuple[str, ...]:
        """Parameters whose copies differ between ranks, see `agreement`."""
        return disagreements(self.buckets, self.comm)

    def left_over(self) -> tuple[str, ...]:
        """What a step must not find at its start: gradients that are not zero or still on their way, and microbatches
        whose backward is missing."""
        buckets = (f"gradients of {name}" for name, bucket in self._trained.items() if not bucket.clean)
        units = (unit for stage in self.stages.values() for unit in stage.units)
        return *buckets, *(f"microbatches of {unit.name}" for unit in units if unit.under_way)

    def live_bytes(self) -> Ledger:
        """State alive now on this rank, by category, from live storages, and what waits for weight backwards."""
        queued = {t.untyped_storage()._cdata: t for stage in self.stages.values() for t in stage.queued()}
        waiting = sum(tensor.untyped_storage().nbytes() for tensor in queued.values())
        total = Ledger({"optimizer": self.optimizer.live_bytes(), "weight_queue": waiting})
        for bucket in self.buckets.values():
            total += bucket.live_bytes()
        return total

    def _samples(self, tokens: Tensor, consumed: int | None) -> Tensor | None:
        """Numbers of this rank's samples among all of the run [microbatches, micro-batch]."""
        if consumed is None:
            return None
        mine, rows, _ = tokens.shape
        first = consumed + self.comm.coord.dp * mine * rows
        return torch.arange(first, first + mine * rows, device=self.device).view(mine, rows)

    def _microbatches(
        self, tokens: Tensor, labels: Tensor, documents: Tensor | None, samples: Tensor | None
    ) -> list[Microbatch]:
        agree_on_shape(tokens.shape, self.comm, self.device)
        labels = labels.to(self.device)
        valid = self.comm.all_reduce((labels >= 0).sum().double().reshape(1), "batch")
        scale = valid.clamp(min=1.0).reciprocal().squeeze(0)

        def sequence_first(rows_MBS: Tensor) -> list[Tensor]:
            return [rows_BS.t().contiguous() for rows_BS in rows_MBS.to(self.device)]

        none = [None] * len(tokens)
        numbers = sequence_first(documents) if documents is not None else none
        rows = samples if samples is not None else none
        parts = zip(sequence_first(tokens), sequence_first(labels), numbers, rows, strict=True)
        return [Microbatch(t, at, scale, of, row) for t, at, of, row in parts]

    def _boundary(self, tokens: Tensor) -> tuple[int, int, int]:
        _, rows, sequence = tokens.shape
        layout = self.job.parallel
        cut = layout.tp if layout.sequence_parallel else 1
        return sequence // cut, rows, self.job.model.hidden
