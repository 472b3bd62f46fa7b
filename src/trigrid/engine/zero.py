"""One bucketed data-parallel engine for ZeRO stages 0 to 3.

A bucket holds the weights of a unit and their gradients. What it keeps between uses, between microbatches and between
steps follows from `ZeroPolicy`; every stage runs the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trigrid.blueprint.buckets import BucketLayout, Run
from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.comm import Comm, Pending
from trigrid.ledger import Ledger
from trigrid.spec.layout import ZeroPolicy
from trigrid.spec.precision import Format, Precision

TORCH_DTYPE: dict[Format, torch.dtype] = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}

Initialise = Callable[[LocalParameter], Tensor]


@dataclass(frozen=True)
class Dtypes:
    """The number formats of a bucket, see `Precision`."""

    compute: torch.dtype
    gather: torch.dtype
    reduce: torch.dtype
    master: torch.dtype

    @classmethod
    def of(cls, precision: Precision) -> Dtypes:
        return cls(*(TORCH_DTYPE[f] for f in (precision.compute, precision.gather, precision.reduce, precision.master)))


class Reducing:
    """The one reduction within a step that a rank has under way: of a unit, while the backward of the next computes."""

    def __init__(self) -> None:
        self._bucket: Bucket | None = None

    def begin(self, bucket: Bucket) -> None:
        """That of `bucket` follows: the one before it must be over."""
        if self._bucket is not None:
            self._bucket.settle()
        self._bucket = bucket


class Bucket:
    """Weights and gradients of one flat layout on one rank.

    `held` is the range of elements that this rank's optimizer updates: its shard, or everything under ZeRO-0.
    `master` holds their weights, a view of the full weights where these have the same format and are kept.
    `weights` are the full weights in the compute format, None while they are given up. A frozen bucket has weights
    alone, whose shard needs no wider format.
    """

    def __init__(
        self,
        layout: BucketLayout,
        policy: ZeroPolicy,
        dtypes: Dtypes,
        comm: Comm,
        device: torch.device,
        initialise: Initialise,
        reducing: Reducing,
    ):
        self.layout = layout
        self.policy = policy
        self.frozen = layout.frozen
        self.dtypes = dtypes if not self.frozen else replace(dtypes, master=dtypes.compute)
        dtypes = self.dtypes
        self._comm = comm
        start = comm.group("zero").index * layout.shard_numel
        self.shard = (start, start + layout.shard_numel)
        self.held = self.shard if policy.shard_optimizer else (0, layout.numel)

        self.weights: Tensor | None = None
        self._gathering: Pending | None = None
        if policy.shard_weights:
            self.master = torch.zeros(layout.shard_numel, dtype=dtypes.master, device=device)
            self._fill(self.master, self.shard, initialise)
        else:
            self.weights = torch.zeros(layout.numel, dtype=dtypes.compute, device=device)
            if dtypes.compute == dtypes.master:
                self._fill(self.weights, (0, layout.numel), initialise)
                self.master = self.weights[self.held[0] : self.held[1]]
            else:
                self.master = torch.zeros(self.held[1] - self.held[0], dtype=dtypes.master, device=device)
                self._fill(self.weights, (0, layout.numel), initialise, (self.master, self.held))

        kept = 0 if self.frozen else layout.shard_numel if policy.reduce_per_microbatch else layout.numel
        self._gradients = torch.zeros(kept, dtype=dtypes.reduce, device=device)
        self._transient: Tensor | None = None
        # Entries of it that nothing has been written to.
        self._blank: set[int] = set()
        self._rank_reducing = reducing
        self._reducing: Pending | None = None
        self._backwards_left = 0
        # Largest |gradient| of each entry before any sum over ranks: says whose gradient was not finite.
        self.peaks = torch.zeros(len(layout.entries), dtype=dtypes.reduce, device=device)

    def _fill(
        self,
        out: Tensor,
        span: tuple[int, int],
        initialise: Initialise,
        also: tuple[Tensor, tuple[int, int]] | None = None,
    ) -> None:
        """Write the initial values of elements `span` into `out`; one parameter is whole at a time, never all."""
        for entry in self.layout.entries:
            if entry.stop <= span[0] or entry.offset >= span[1]:
                continue
            values = initialise(entry.local).flatten()
            for target, (start, stop) in [(out, span), *([also] if also else [])]:
                first, last = max(entry.offset, start), min(entry.stop, stop)
                if first < last:
                    target[first - start : last - start] = values[first - entry.offset : last - entry.offset]

    # Weights

    def open_start(self) -> None:
        """Begin to make the full weights present."""
        if self.weights is None and self._gathering is None:
            shard = self.master.to(self.dtypes.gather)
            self._gathering = self._comm.all_gather_start(shard, "zero")

    def open(self) -> None:
        """Make the full weights present."""
        self.open_start()
        if self._gathering is not None:
            self.weights = self._gathering.wait().to(self.dtypes.compute)
            self._gathering = None

    def close(self) -> None:
        """Its units are through with the weights for now."""
        if self.policy.gather_per_use:
            self.release()

    def release(self) -> None:
        """Give up full weights that can be gathered again."""
        if self.policy.shard_weights:
            assert self._gathering is None, f"weights of {self.layout.name} are gathered and not used"
            self.weights = None

    @property
    def discards(self) -> bool:
        """Whether weights are given up between forward and backward."""
        return self.policy.gather_per_use

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of the open weights."""
        return self.weights is not None and same_storage(tensor, self.weights)

    def view(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A view of the open weights; the bucket must have been opened."""
        assert self.weights is not None, f"weights of {self.layout.name} are used while they are not gathered"
        return self.weights.as_strided(shape, stride, offset)

    def weight(self, first: int, last: int) -> Tensor:
        """Entries `first` to `last`, row after row."""
        assert self.weights is not None, f"weights of {self.layout.name} are used while they are not gathered"
        return self._rows(self.weights, first, last)

    def _rows(self, full: Tensor, first: int, last: int) -> Tensor:
        entries = self.layout.entries
        return full[entries[first].offset : entries[last].stop].view(-1, *entries[first].local.shape[1:])

    # Gradients

    def start_step(self, backwards: int) -> None:
        """Before a step in which backward passes come to this bucket `backwards` times."""
        self._gradients.zero_()
        self.peaks.zero_()
        self._backwards_left = backwards

    @property
    def clean(self) -> bool:
        """Whether no gradient is there or on its way."""
        return self._transient is None and self._reducing is None and not bool(self._gradients.any())

    def open_gradients(self) -> None:
        """Before the backward of its units."""
        if self.policy.reduce_per_microbatch and self._transient is None and not self.frozen:
            self._transient = torch.empty(self.layout.numel, dtype=self.dtypes.reduce, device=self._gradients.device)
            self._blank = set(range(len(self.layout.entries)))

    def add_gradient(self, first: int, last: int, gradient: Tensor) -> None:
        """That of `weight(first, last)`."""
        part, blank = self._gradient(first, last)
        if blank:
            part.copy_(gradient)
        else:
            part.add_(gradient)

    def add_product(self, first: int, last: int, left: Tensor, right: Tensor) -> None:
        """The same of left · right; where formats are the same nothing else is written than what is there."""
        part, blank = self._gradient(first, last)
        if part.dtype != left.dtype:
            product = left @ right
            part.copy_(product) if blank else part.add_(product)
        elif blank:
            torch.mm(left, right, out=part)
        else:
            torch.addmm(part, left, right, out=part)

    def _gradient(self, first: int, last: int) -> tuple[Tensor, bool]:
        """Where that of `weight(first, last)` is, and whether nothing has been written there."""
        part = self._rows(self._gradients if self._transient is None else self._transient, first, last)
        blank = first in self._blank
        if blank:
            self._blank.difference_update(range(first, last + 1))
        return part, blank

    def close_gradients(self) -> None:
        """After the backward of its units: reduce what the policy says; after the last, start the step's reduction."""
        if self.frozen:
            return
        self._backwards_left -= 1
        if self._transient is not None:
            for index in self._blank:
                entry = self.layout.entries[index]
                self._transient[entry.offset : entry.stop].zero_()
            self._blank.clear()
            self._transient[self.layout.entries[-1].stop :].zero_()
            self._note_peaks(self._transient)
            self._rank_reducing.begin(self)
            self._reducing = self._comm.reduce_scatter_start(self._transient, "zero")
            self._transient = None
            if self._comm.group("zero").size == 1:
                self.settle()
        elif self._backwards_left == 0:
            self._note_peaks(self._gradients)
            if self.policy.shard_optimizer:
                self._reducing = self._comm.reduce_scatter_start(self._gradients, "zero")
            else:
                self._reducing = self._comm.all_reduce_start(self._gradients, "zero")

    def settle(self) -> None:
        """Wait for a reduction within the step, and add what it gives."""
        if self._reducing is not None and self.policy.reduce_per_microbatch:
            self._gradients += self._reducing.wait()
            self._reducing = None

    def _note_peaks(self, full: Tensor) -> None:
        # Ends instead of an infinity norm, which is not vectorized on CPUs: 18 times as fast.
        ends = [torch.stack(torch.aminmax(full[e.offset : e.stop])) for e in self.layout.entries]
        self.peaks = torch.maximum(self.peaks, torch.stack(ends).abs().amax(1))

    def reduced(self) -> Tensor:
        """This step's gradients of `held`, summed over data parallelism; to be called once, after the last backward."""
        assert self._backwards_left == 0, f"{self.layout.name}: {self._backwards_left} backward passes are missing"
        self.settle()
        gradients = self._gradients
        if self._reducing is not None:
            gradients = self._reducing.wait()
            self._reducing = None
        return self._comm.all_reduce(gradients, "replicate")

    # The optimizer's side

    def held_runs(self) -> tuple[Run, ...]:
        """Runs of `held`, counted from its start."""
        return _shifted(self.layout.runs, *self.held)

    def norm_runs(self) -> tuple[Run, ...]:
        """Owned runs of this rank's shard, counted from the start of `held`: over all ranks, each element once."""
        start, stop = self.shard
        inside = (run.within(start, stop) for run in self.layout.runs if run.owned)
        return _shifted(tuple(run for run in inside if run is not None), *self.held)

    def refresh(self) -> None:
        """After the optimizer has changed `master`: bring the full weights up to date, or give them up."""
        if self.policy.shard_weights or not self.frozen:
            self.spread()

    def spread(self) -> None:
        """After `master` was changed: as `refresh`, also where it is frozen."""
        if self.policy.shard_weights:
            self.release()
        elif self.policy.shard_optimizer:
            assert self.weights is not None
            gathered = self._comm.all_gather(self.master.to(self.dtypes.gather), "zero").to(self.dtypes.compute)
            if self._comm.group("zero").size > 1 or self.dtypes.compute != self.dtypes.master:
                self.weights.copy_(gathered)
        elif self.dtypes.compute != self.dtypes.master:
            assert self.weights is not None
            self.weights.copy_(self.master)

    def live_bytes(self) -> Ledger:
        """State alive now, from the storages themselves; a storage that serves two purposes counts once. What a
        reduction under way receives into is communication, not state, and is not counted."""
        seen: set[int] = set()

        def count(*tensors: Tensor | None) -> int:
            total = 0
            for tensor in tensors:
                if tensor is not None and tensor.untyped_storage()._cdata not in seen:
                    seen.add(tensor.untyped_storage()._cdata)
                    total += tensor.untyped_storage().nbytes()
            return total

        return Ledger(
            {
                "weights": count(self.weights, self._gathering.arriving if self._gathering else None),
                "master": count(self.master),
                "gradients": count(self._gradients, self._transient),
            }
        )


def same_storage(a: Tensor, b: Tensor) -> bool:
    # By the storage object: fake tensors, which the dry run uses, have no data pointer.
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _shifted(runs: tuple[Run, ...], start: int, stop: int) -> tuple[Run, ...]:
    inside = (run.within(start, stop) for run in runs)
    return tuple(Run(run.start - start, run.stop - start, run.decay, run.sum_group, run.owned) for run in inside if run)
