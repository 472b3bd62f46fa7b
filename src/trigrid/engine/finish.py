"""The end of a step, from gradients of this rank's tokens to new weights, in an order that matters.

1 the last data-parallel reductions; 2 one sum over TP (and over the holders of a KV head) of gradients of which each
rank has a part; 3 the tied embedding's sum between first and last stage; 4 one all-reduce of the squared norm, the
guard's flag, the loss and whether to stop; 5 clip and AdamW; 6 gather weights. The sums of 2 and 3 come after 1, on
shards: reducing a partial sum over data parallelism first and mixing stages later, or the reverse, is the same sum only
if every rank does both on the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trigrid.engine.comm import Comm
from trigrid.engine.zero import Bucket
from trigrid.spec.job import Optimizer


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the global valid tokens; gradient_norm: before clipping; not_finite: what stopped the update,
    if anything; asked_to_stop: whether any rank has been told to stop, known to all."""

    loss: float
    gradient_norm: float
    not_finite: tuple[str, ...] = ()
    asked_to_stop: bool = False

    @property
    def updated(self) -> bool:
        return not self.not_finite


def sum_gradients(buckets: Mapping[str, Bucket], comm: Comm) -> dict[str, Tensor]:
    """Phases 1 to 3. Returns the gradients of each bucket's `held` range, complete."""
    gradients = {name: bucket.reduced() for name, bucket in buckets.items()}
    for axis in ("tp", "kv"):
        parts = [
            gradients[name][run.start : run.stop]
            for name, bucket in buckets.items()
            for run in bucket.held_runs()
            if run.sum_group == axis
        ]
        if parts:
            total = comm.all_reduce(torch.cat(parts), axis)
            for part, summed in zip(parts, torch.split(total, [p.numel() for p in parts]), strict=True):
                part.copy_(summed)
    for name, bucket in buckets.items():
        if bucket.layout.tied:
            comm.all_reduce(gradients[name], "tied")
    return gradients


class ShardOptimizer:
    """AdamW on the ranges that this rank holds: torch's own, on slices of the buckets' master weights.

    moments: of each bucket the first and the second, each one array from the start of `held` to its last run's end.
    """

    def __init__(self, buckets: Mapping[str, Bucket], spec: Optimizer):
        self._slices: list[tuple[str, slice, Tensor]] = []
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        state = {}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        for name, bucket in buckets.items():
            runs = bucket.held_runs()
            trained = bucket.master[: runs[-1].stop if runs else 0]
            mean, square = self.moments[name] = torch.zeros_like(trained), torch.zeros_like(trained)
            for run in runs:
                span = slice(run.start, run.stop)
                weight = bucket.master[span]
                self._slices.append((name, span, weight))
                groups[run.decay].append(weight)
                updates = torch.zeros((), device=weight.device)
                state[weight] = {"step": updates, "exp_avg": mean[span], "exp_avg_sq": square[span]}
        parameters = [
            {"params": weights, "weight_decay": spec.weight_decay if decay else 0.0}
            for decay, weights in groups.items()
            if weights
        ]
        # A rank whose shards are all tail has nothing to update.
        self._adamw = (
            torch.optim.AdamW(parameters, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
            if parameters
            else None
        )
        if self._adamw is not None:
            # Made here, not by torch at the first step, so that a checkpoint can be read into them.
            self._adamw.state.update(state)

    def resume(self, updates: int) -> None:
        """After `moments` were set to those of that many updates."""
        if self._adamw is not None:
            for state in self._adamw.state.values():
                state["step"].fill_(updates)

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One update with the gradients of each bucket's `held` range."""
        if self._adamw is None:
            return
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for name, span, weight in self._slices:
            weight.grad = gradients[name][span]
        self._adamw.step()
        for _, _, weight in self._slices:
            weight.grad = None

    def live_bytes(self) -> int:
        """Bytes of the moments."""
        return sum(moment.untyped_storage().nbytes() for moments in self.moments.values() for moment in moments)


def squared_norm(
    buckets: Mapping[str, Bucket], gradients: Mapping[str, Tensor], comm: Comm, device: torch.device
) -> Tensor:
    """This rank's part of the squared global norm, in fp64: each logical element is counted on one rank only.

    A tied weight is counted on the first stage.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, bucket in buckets.items():
        if bucket.layout.tied and comm.coord.pp > 0:
            continue
        for run in bucket.norm_runs():
            total += torch.linalg.vector_norm(gradients[name][run.start : run.stop], dtype=torch.float64).square()
    return total if comm.group("replicate").index == 0 else torch.zeros_like(total)


def update(
    buckets: Mapping[str, Bucket],
    gradients: Mapping[str, Tensor],
    loss: Tensor,
    optimizer: ShardOptimizer,
    comm: Comm,
    lr: float,
    clip_norm: float,
    stop: bool = False,
) -> StepResult:
    """Phases 4 to 6. Where any rank's gradient is not finite nothing is changed, and the result names the culprits.

    stop: this rank has been told to stop, which all learn without a collective of its own.
    """
    fine = torch.ones(1, dtype=torch.bool, device=loss.device)
    flag = ~torch.cat([fine, *(bucket.peaks.isfinite() for bucket in buckets.values())]).all()
    mine = loss if comm.coord.tp == 0 else torch.zeros_like(loss)
    squares = squared_norm(buckets, gradients, comm, loss.device)
    told = torch.full_like(squares, float(stop))
    norm2, flagged, total_loss, stops = comm.read(
        comm.all_reduce(torch.stack([squares, flag.double(), mine.double(), told]), "world")
    )
    if flagged or not math.isfinite(norm2):
        return StepResult(total_loss, math.nan, _culprits(buckets.values(), comm), stops > 0)
    norm = math.sqrt(norm2)
    if 0 < clip_norm < norm:
        for gradient in gradients.values():
            gradient.mul_(clip_norm / norm)
    optimizer.step(gradients, lr)
    for bucket in buckets.values():
        bucket.refresh()
    return StepResult(total_loss, norm, asked_to_stop=stops > 0)


def _culprits(buckets: Iterable[Bucket], comm: Comm) -> tuple[str, ...]:
    """Every (rank, parameter) whose own gradient, before any sum over ranks, was not finite."""
    names = [
        f"rank {comm.rank}: {entry.local.parameter.name}"
        for bucket in buckets
        for entry, peak in zip(bucket.layout.entries, bucket.peaks.tolist(), strict=True)
        if not math.isfinite(peak)
    ]
    found = [name for names_of_rank in comm.gather_objects(names) for name in names_of_rank]  # type: ignore[attr-defined]
    return tuple(found) or ("every rank: finite gradients whose sum overflows",)
