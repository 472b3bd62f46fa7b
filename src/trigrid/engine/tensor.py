"""Tensor parallelism on local tensors (Shoeybi 2019), with sequence parallelism (Korthikanti 2022).

Activations between units are x_SBH: sequence, batch, hidden. Under sequence parallelism each rank holds S/tp of the
sequence there, and all of it between `enter` and `leave`; sequence first, so that gathering it moves contiguous memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.comm import Comm


class TensorParallel:
    """The tensor-parallel regions of one rank."""

    def __init__(self, comm: Comm, sequence_parallel: bool):
        self.comm = comm
        self.size = comm.group("tp").size
        self.sequence_parallel = sequence_parallel and self.size > 1

    def enter(self, x_SBH: Tensor) -> Tensor:
        """Into a region where ranks hold different columns: the whole sequence on every rank; backward sums over TP."""
        if self.size == 1:
            return x_SBH
        region = _GatherSequence if self.sequence_parallel else _Copy
        return region.apply(x_SBH, self.comm)  # type: ignore[no-untyped-call, no-any-return]

    def leave(self, x_SBH: Tensor) -> Tensor:
        """Out of such a region: partial results summed over TP, cut along the sequence under sequence parallelism."""
        if self.size == 1:
            return x_SBH
        region = _ScatterSequence if self.sequence_parallel else _Sum
        return region.apply(x_SBH, self.comm)  # type: ignore[no-untyped-call, no-any-return]

    def own_sequence(self, sequence: int) -> slice:
        """The places of the sequence that this rank holds between regions."""
        if not self.sequence_parallel:
            return slice(0, sequence)
        share, index = sequence // self.size, self.comm.group("tp").index
        return slice(index * share, (index + 1) * share)

    def embed(self, tokens_SB: Tensor, weight_VH: Tensor, local: LocalParameter) -> Tensor:
        """Vocabulary-parallel look-up: each rank embeds the tokens of its rows and zero for all others."""
        if self.size == 1:
            return F.embedding(tokens_SB, weight_VH)
        start, stop = local.box[0]
        here_SB1 = ((tokens_SB >= start) & (tokens_SB < stop)).unsqueeze(-1)
        rows_SB = (tokens_SB - start).clamp(0, local.shape[0] - 1)
        return self.leave(F.embedding(rows_SB, weight_VH) * here_SB1)

    def cross_entropy(self, logits_SBV: Tensor, labels_SB: Tensor, scale: Tensor, local: LocalParameter) -> Tensor:
        """Sum over tokens of the cross-entropy, times `scale` (a scalar); logits are cut over the vocabulary.

        Labels of −100 are ignored. `local` is the head's weight, whose box says which columns are vocabulary and
        which are padding. Computed in fp32, or fp64 for fp64 logits; logits are never gathered.
        """
        loss: Tensor = _CrossEntropy.apply(logits_SBV, labels_SB, scale, local.box[0], self.comm)  # type: ignore[no-untyped-call]
        return loss


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Cloned: autograd may hand the same tensor to another branch.
        return ctx.comm.all_reduce(grad.clone(memory_format=torch.contiguous_format), "tp"), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), "tp")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x, "tp")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.reduce_scatter(grad, "tp"), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.reduce_scatter(x, "tp")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_gather(grad, "tp"), None


class _CrossEntropy(torch.autograd.Function):
    """Keeps only the local part of the softmax for backward."""

    @staticmethod
    def forward(
        ctx: Any, logits_SBV: Tensor, labels_SB: Tensor, scale: Tensor, columns: tuple[int, int], comm: Comm
    ) -> Tensor:
        wide = torch.promote_types(logits_SBV.dtype, torch.float32)
        probs_SBV = logits_SBV.to(wide, copy=True)
        start, stop = columns
        probs_SBV[..., stop - start :] = -torch.inf
        peak_SB = comm.all_reduce(probs_SBV.amax(-1), "tp", "max")
        probs_SBV -= peak_SB.unsqueeze(-1)

        valid_SB = labels_SB >= 0
        here_SB = (labels_SB >= start) & (labels_SB < stop)
        column_SB1 = (labels_SB - start).clamp(0, logits_SBV.shape[-1] - 1).unsqueeze(-1)
        target_SB = torch.where(here_SB, probs_SBV.gather(-1, column_SB1).squeeze(-1), 0.0)

        probs_SBV.exp_()
        sums_2SB = comm.all_reduce(torch.stack([probs_SBV.sum(-1), target_SB]), "tp")
        probs_SBV /= sums_2SB[0].unsqueeze(-1)
        weight_SB = valid_SB * scale.to(wide)
        ctx.save_for_backward(probs_SBV, column_SB1, here_SB, weight_SB)
        ctx.dtype = logits_SBV.dtype
        return ((sums_2SB[0].log() - sums_2SB[1]) * weight_SB).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probs_SBV, column_SB1, here_SB, weight_SB = ctx.saved_tensors
        # Once is all: a unit's graph is walked a single time, so the saved softmax becomes the gradient.
        probs_SBV.scatter_add_(-1, column_SB1, -here_SB.unsqueeze(-1).to(probs_SBV.dtype))
        probs_SBV *= (weight_SB * grad).unsqueeze(-1)
        return probs_SBV.to(ctx.dtype), None, None, None, None
