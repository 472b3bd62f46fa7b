"""Tensor parallelism on local tensors (Shoeybi 2019), with sequence parallelism (Korthikanti 2022).

Activations between units are x_SBH: sequence, batch, hidden. Under sequence parallelism each rank holds S/tp of the
sequence there, and all of it between `enter` and `leave`; sequence first, so that gathering it moves contiguous memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.again import Make, through, with_graph
from trigrid.engine.comm import Collectives
from trigrid.engine.handover import Factors, Handover, Sink

Region = Literal["gather", "copy"]


class Layer(NamedTuple):
    """sink: takes the gradient of the weight, which then is in no graph."""

    weight: Tensor
    bias: Tensor | None = None
    sink: Sink | None = None


class TensorParallel:
    """The tensor-parallel regions of one rank, and its products. handover: takes what gradients of their weights are
    made of."""

    def __init__(
        self,
        comm: Collectives,
        sequence_parallel: bool,
        regather: bool = False,
        handover: Handover | None = None,
    ):
        self.comm = comm
        self.handover = handover or Handover()
        self.size, self.index = comm.group("tp").size, comm.group("tp").index
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
        share = sequence // self.size
        return slice(self.index * share, (self.index + 1) * share)

    def embed(self, tokens_SB: Tensor, weight_VH: Tensor, local: LocalParameter) -> Tensor:
        """Vocabulary-parallel look-up: each rank embeds the tokens of its rows and zero for all others."""
        if self.size == 1:
            return F.embedding(tokens_SB, weight_VH)
        start, stop = local.box[0]
        here_SB1 = ((tokens_SB >= start) & (tokens_SB < stop)).unsqueeze(-1)
        rows_SB = (tokens_SB - start).clamp(0, local.shape[0] - 1)
        return self.leave(F.embedding(rows_SB, weight_VH) * here_SB1)

    def column(self, make: Make, inputs: Sequence[Tensor], layers: Iterable[Layer], *, again: bool) -> Tensor:
        """What `make` makes of `inputs`, into a region and through layers cut over their outputs, each taken when its
        turn comes; the outputs side by side.

        again: what `make` makes is not kept but made again in backward, unless it must be gathered and is kept whole.
        With `regather`, the whole sequence is gathered once more in backward instead of being kept.
        """
        if self.sequence_parallel and not self.regather:
            again = False
        region: Region | None = None if self.size == 1 else "gather" if self.sequence_parallel else "copy"
        if again:
            return _side_by_side(self._products(make, inputs, layers, region))
        x_SBH = make(*inputs)
        if self.sequence_parallel and self.regather:
            return _side_by_side(self._products(_same, [x_SBH], layers, region))
        return _side_by_side(self.products(self.enter(x_SBH), layers))

    def row(self, make: Make, inputs: Sequence[Tensor], layers: Iterable[Layer], *, again: bool) -> Tensor:
        """What `make` makes of `inputs`, through the one of `layers`, cut over its inputs, and out of the region."""
        (y,) = self._products(make, inputs, layers, None) if again else self.products(make(*inputs), layers)
        return self.leave(y)

    def products(self, x: Tensor, layers: Iterable[Layer]) -> tuple[Tensor, ...]:
        """`x` through each of `layers`, outside of any region."""
        layers = list(layers)
        if any(layer.sink for layer in layers):
            return self._products(_same, [x], layers, None)
        return tuple(F.linear(x, layer.weight, layer.bias) for layer in layers)

    def _products(
        self,
        make: Make,
        inputs: Sequence[Tensor],
        layers: Iterable[Layer],
        region: Region | None,
    ) -> tuple[Tensor, ...]:
        weights, biases, sinks = zip(*layers, strict=True)
        assert not any(weight.requires_grad for weight in weights), "a product in backward has no sink for a gradient"
        return _Products.apply(make, self, region, sinks, weights, len(inputs), *inputs, *biases)  # type: ignore[no-untyped-call, no-any-return]


def _side_by_side(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _same(x: Tensor) -> Tensor:
    return x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Not in place: autograd may hand the same tensor to another branch.
        return ctx.comm.summed(grad, "tp"), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives) -> Tensor:
        return comm.summed(x, "tp")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x, "tp")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.reduce_scatter(grad, "tp"), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives) -> Tensor:
        ctx.comm = comm
        return comm.reduce_scatter(x, "tp")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_gather(grad, "tp"), None


class _Products(torch.autograd.Function):
    """Products of one tensor with several weights, of which backward finds only what the tensor is made from.

    region: where its columns are cut over TP, "gather" along the sequence or "copy", by which backward sums.
    """

    @staticmethod
    def forward(
        ctx: Any,
        make: Make,
        tp: TensorParallel,
        region: Region | None,
        sinks: Sequence[Sink | None],
        weights: Sequence[Tensor],
        count: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        inputs, biases = tensors[:count], tensors[count:]
        ctx.make, ctx.tp, ctx.region, ctx.sinks, ctx.count = make, tp, region, sinks, count
        kept = inputs if make is not _same or any(sinks) else ()
        ctx.save_for_backward(*weights, *kept)
        x = make(*inputs)
        if region == "gather":
            x = tp.comm.all_gather(x, "tp")
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[6:]
        of_inputs, of_biases = needed[: ctx.count], needed[ctx.count :]
        weights, inputs = ctx.saved_tensors[: len(grads)], ctx.saved_tensors[len(grads) :]
        plain = ctx.make is _same
        if not plain:
            leaves, made = with_graph(ctx.make, inputs, of_inputs)
        if any(ctx.sinks):
            # Detached: what is put off must not keep a graph.
            _hand_over(ctx, (inputs[0] if plain else made).detach(), grads)
        biases = [g.flatten(0, -2).sum(0) if needed else None for g, needed in zip(grads, of_biases, strict=True)]
        found: list[Tensor | None] = [None] * ctx.count
        if any(of_inputs):
            into = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                into += grad @ weight
            if ctx.region == "gather":
                into = ctx.tp.comm.reduce_scatter(into, "tp")
            elif ctx.region == "copy":
                into = ctx.tp.comm.all_reduce(into, "tp")
            found = [into] if plain else through(leaves, made, into)
        return None, None, None, None, None, None, *found, *biases


def _hand_over(ctx: Any, x: Tensor, grads: Sequence[Tensor]) -> None:
    """What the weights' gradients are made of."""
    whole = partial(ctx.tp.comm.all_gather, axis="tp") if ctx.region == "gather" else _same
    sinks, of_outputs = zip(*((sink, grad) for sink, grad in zip(ctx.sinks, grads, strict=True) if sink), strict=True)
    ctx.tp.handover.give(Factors(sinks, x, whole, of_outputs))
