"""Cross-entropy of logits cut over the vocabulary (Shoeybi 2019, section 3), whole or in pieces of the sequence.

Logits are never gathered. The softmax is computed in fp32, or in fp64 for fp64 logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.comm import Collectives
from trigrid.engine.tensor import Layer, TensorParallel


def head_loss(
    x_SBH: Tensor,
    head: Layer,
    labels_SB: Tensor,
    scale: Tensor,
    local: LocalParameter,
    tp: TensorParallel,
    chunks: int,
) -> Tensor:
    """Sum over tokens of the cross-entropy of the head's logits, times `scale` (a scalar).

    Labels of −100 are ignored. `local` is the head's weight, whose box says which rows are vocabulary and which are
    padding. chunks: pieces of the sequence; more than one bounds the logits to a piece, computed again in backward.
    """
    if chunks == 1:
        (logits_SBV,) = tp.products(x_SBH, [head])
        return cross_entropy(logits_SBV, labels_SB, scale, local.box[0], tp.comm)
    return _InChunks.apply(x_SBH, head.weight, labels_SB, scale, local.box[0], tp.comm, chunks)  # type: ignore[no-untyped-call, no-any-return]


def cross_entropy(
    logits_SBV: Tensor, labels_SB: Tensor, scale: Tensor, columns: tuple[int, int], comm: Collectives
) -> Tensor:
    """As `head_loss`, of logits; those in at least fp32 are given up for it, and become their own gradient. columns: of
    the vocabulary, which are this rank's."""
    return _CrossEntropy.apply(logits_SBV, labels_SB, scale, columns, comm)  # type: ignore[no-untyped-call, no-any-return]


class _Softmax(NamedTuple):
    """exp_SBV: exponentials of this rank's columns over the peak's; sum_SB: over all columns; loss_SB: of every token,
    ignored or not; column_SB1: this rank's column of each label; here_SB: whether it is one of this rank's."""

    exp_SBV: Tensor
    peak_SB: Tensor
    sum_SB: Tensor
    loss_SB: Tensor
    column_SB1: Tensor
    here_SB: Tensor


def _softmax(logits_SBV: Tensor, labels_SB: Tensor, columns: tuple[int, int], comm: Collectives) -> _Softmax:
    shifted_SBV = _wide(logits_SBV, columns)
    peak_SB = comm.all_reduce(shifted_SBV.amax(-1), "tp", "max")
    shifted_SBV -= peak_SB.unsqueeze(-1)
    column_SB1, here_SB = _labels(labels_SB, columns, logits_SBV.shape[-1])
    target_SB = torch.where(here_SB, shifted_SBV.gather(-1, column_SB1).squeeze(-1), 0.0)
    exp_SBV = shifted_SBV.exp_()
    sums_2SB = comm.all_reduce(torch.stack([exp_SBV.sum(-1), target_SB]), "tp")
    return _Softmax(exp_SBV, peak_SB, sums_2SB[0], sums_2SB[0].log() - sums_2SB[1], column_SB1, here_SB)


def _wide(logits_SBV: Tensor, columns: tuple[int, int]) -> Tensor:
    """In at least fp32, with padding that can have no share. Logits that have such a format are given up for it."""
    wide_SBV = logits_SBV.to(torch.promote_types(logits_SBV.dtype, torch.float32))
    wide_SBV[..., columns[1] - columns[0] :] = -torch.inf
    return wide_SBV


def _labels(labels_SB: Tensor, columns: tuple[int, int], width: int) -> tuple[Tensor, Tensor]:
    start, stop = columns
    here_SB = (labels_SB >= start) & (labels_SB < stop)
    return (labels_SB - start).clamp(0, width - 1).unsqueeze(-1), here_SB


def _into_gradient(exp_SBV: Tensor, share_SB: Tensor, column_SB1: Tensor, here_SB: Tensor, weight_SB: Tensor) -> Tensor:
    """The logits' gradient, in place of the exponentials; share: a token's weight over their sum."""
    exp_SBV.mul_(share_SB.unsqueeze(-1))
    return exp_SBV.scatter_add_(-1, column_SB1, (here_SB * -weight_SB).unsqueeze(-1))


class _CrossEntropy(torch.autograd.Function):
    """Keeps this rank's exponentials for backward; logits in fp32 become them, so nothing else may need them."""

    @staticmethod
    def forward(
        ctx: Any, logits_SBV: Tensor, labels_SB: Tensor, scale: Tensor, columns: tuple[int, int], comm: Collectives
    ) -> Tensor:
        # Detached: what takes the place of logits is kept without their graph.
        found = _softmax(logits_SBV.detach(), labels_SB, columns, comm)
        weight_SB = (labels_SB >= 0) * scale.to(found.sum_SB.dtype)
        ctx.save_for_backward(found.exp_SBV, weight_SB / found.sum_SB, found.column_SB1, found.here_SB, weight_SB)
        ctx.dtype = logits_SBV.dtype
        return (found.loss_SB * weight_SB).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        exp_SBV, share_SB, column_SB1, here_SB, weight_SB = ctx.saved_tensors
        # Once is all: a unit's graph is walked a single time, so what is saved becomes the gradient.
        into_SBV = _into_gradient(exp_SBV, share_SB * grad, column_SB1, here_SB, weight_SB * grad)
        return into_SBV.to(ctx.dtype), None, None, None, None


class _InChunks(torch.autograd.Function):
    """Keeps the input, and two numbers of each token, with which backward needs no communication."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        weight_VH: Tensor,
        labels_SB: Tensor,
        scale: Tensor,
        columns: tuple[int, int],
        comm: Collectives,
        chunks: int,
    ) -> Tensor:
        parts = [
            _softmax(F.linear(x, weight_VH), labels, columns, comm)._replace(exp_SBV=x.new_empty(0))
            for x, labels in zip(x_SBH.chunk(chunks), labels_SB.chunk(chunks), strict=True)
        ]
        peak_SB, sum_SB = torch.cat([p.peak_SB for p in parts]), torch.cat([p.sum_SB for p in parts])
        loss_SB = torch.cat([p.loss_SB for p in parts])
        weight_SB = (labels_SB >= 0) * scale.to(loss_SB.dtype)
        ctx.save_for_backward(x_SBH, weight_VH, labels_SB, peak_SB, sum_SB, weight_SB)
        ctx.columns, ctx.chunks = columns, chunks
        return (loss_SB * weight_SB).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_SBH, weight_VH, labels_SB, peak_SB, sum_SB, weight_SB = ctx.saved_tensors
        inputs = []
        # Pieces are added up in the format of the softmax: as one product they would be rounded only once, too.
        trained = ctx.needs_input_grad[1]
        total_VH = torch.zeros(weight_VH.shape if trained else (), dtype=peak_SB.dtype, device=weight_VH.device)
        per_token = (x_SBH, labels_SB, peak_SB, sum_SB, weight_SB * grad)
        for x, labels, peak, total, weight in zip(*(t.chunk(ctx.chunks) for t in per_token), strict=True):
            exp_SBV = _wide(F.linear(x, weight_VH), ctx.columns).sub_(peak.unsqueeze(-1)).exp_()
            column_SB1, here_SB = _labels(labels, ctx.columns, weight_VH.shape[0])
            logits_SBV = _into_gradient(exp_SBV, weight / total, column_SB1, here_SB, weight).to(x.dtype)
            inputs.append(logits_SBV @ weight_VH)
            if trained:
                total_VH += logits_SBV.flatten(0, 1).t() @ x.flatten(0, 1)
        return torch.cat(inputs), total_VH if trained else None, None, None, None, None, None
