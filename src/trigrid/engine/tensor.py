"""Tensor parallelism on local tensors (Shoeybi 2019), with sequence parallelism (Korthikanti 2022).

Activations between units are x_SBH: sequence, batch, hidden. Under sequence parallelism each rank holds S/tp of the
sequence there, and all of it between `enter` and `leave`; sequence first, so that gathering it moves contiguous memory.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.comm import Comm


class TensorParallel:
    """The tensor-parallel regions of one rank."""

    def __init__(self, comm: Comm, sequence_parallel: bool, regather: bool = False):
        self.comm = comm
        self.size = comm.group("tp").size
        self.sequence_parallel = sequence_parallel and self.size > 1
        self.regather = regather

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

    def column(self, x_SBH: Tensor, *layers: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
        """Into a region and through layers, weight and bias of each cut over its outputs.

        With `regather`, the whole sequence is gathered once more in backward instead of being kept.
        """
        if self.sequence_parallel and self.regather:
            return _GatherAndMultiply.apply(x_SBH, self.comm, *chain(*layers))  # type: ignore[no-untyped-call, no-any-return]
        x_SBH = self.enter(x_SBH)
        return tuple(F.linear(x_SBH, weight, bias) for weight, bias in layers)


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


class _GatherAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, *layers: Tensor | None) -> tuple[Tensor, ...]:
        ctx.comm = comm
        weights, biases = layers[::2], layers[1::2]
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        whole = comm.all_gather(x, "tp")
        pairs = zip(weights, biases, strict=True)
        return tuple(F.linear(whole, weight, bias) for weight, bias in pairs if weight is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        into = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            into += grad @ weight
        into = ctx.comm.reduce_scatter(into, "tp")
        whole = ctx.comm.all_gather(x, "tp").flatten(0, 1)
        layers = [
            part
            for grad, biased in zip((grad.flatten(0, 1) for grad in grads), ctx.biased, strict=True)
            for part in (grad.t() @ whole, grad.sum(0) if biased else None)
        ]
        return into, None, *layers
