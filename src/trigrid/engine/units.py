"""A pipeline stage as a list of units.

Autograd runs per unit: its input is detached, its graph ends at its output. So gathering, recomputing, reducing and
discarding are steps of the two visible loops of `Stage`, without module hooks. A unit boundary is a recompute boundary.

There is no leaf parameter and no `.grad`: a weight enters a unit through `_GetWeight`, whose backward adds the
gradient to the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from trigrid.engine.zero import Bucket


@dataclass(frozen=True, eq=False)
class Microbatch:
    """tokens_SB and labels_SB of one microbatch (labels of −100 are ignored); scale: 1 ÷ the global number of valid
    tokens. documents_SB numbers the documents of each row: a token attends within its own; None: to all before it."""

    tokens_SB: Tensor
    labels_SB: Tensor
    scale: Tensor
    documents_SB: Tensor | None = None


UnitFunction = Callable[[Mapping[str, Tensor], Tensor, Microbatch], Tensor]
"""(weights by role, input, microbatch) → output. The embedding ignores its input, the head returns the scaled loss."""


@dataclass(frozen=True)
class _Saved:
    """What a forward leaves for the backward: the input, and the graph's end unless it is recomputed."""

    x: Tensor
    edge: GradientEdge | None
    microbatch: Microbatch


class RunUnit:
    """A unit with its function and the places of its weights, (role, bucket, entry)."""

    def __init__(self, name: str, function: UnitFunction, places: Sequence[tuple[str, Bucket, int]], recompute: bool):
        self.name = name
        self.buckets = list({id(bucket): bucket for _, bucket, _ in places}.values())
        self._function = function
        self._places = list(places)
        self._recompute = recompute
        self._saved: dict[int, _Saved] = {}

    def forward(self, x: Tensor, index: int, microbatch: Microbatch, keep: bool) -> Tensor:
        """Run on microbatch number `index`; with `keep`, remember what its backward needs."""
        for bucket in self.buckets:
            bucket.open()
        if keep:
            x = x.detach()
            if x.is_floating_point():
                x.requires_grad_()
        if keep and not self._recompute:
            y = self._with_graph(x, microbatch)
            self._saved[index] = _Saved(x, get_gradient_edge(y), microbatch)
            y = y.detach()
        else:
            with torch.no_grad():
                y = self._function(self._weights(None), x, microbatch)
            if keep:
                self._saved[index] = _Saved(x, None, microbatch)
        for bucket in self.buckets:
            bucket.close()
        return y

    def backward(self, gradient: Tensor, index: int) -> Tensor | None:
        """Gradient of the output → gradient of the input (None for the embedding); weights' gradients go to the
        buckets."""
        saved = self._saved.pop(index)
        for bucket in self.buckets:
            bucket.open()
            bucket.open_gradients()
        edge = saved.edge
        if edge is None:
            edge = get_gradient_edge(self._with_graph(saved.x, saved.microbatch))
        torch.autograd.backward([edge], [gradient])
        del edge
        for bucket in self.buckets:
            bucket.close()
            bucket.close_gradients()
        return saved.x.grad

    def _with_graph(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        with torch.enable_grad(), self._never_saving_weights():
            # A leaf that stays without gradient: it only makes autograd visit the weights.
            anchor = torch.zeros((), device=x.device, requires_grad=True)
            return self._function(self._weights(anchor), x, microbatch)

    def _weights(self, anchor: Tensor | None) -> dict[str, Tensor]:
        if anchor is None:
            return {role: bucket.weight(i) for role, bucket, i in self._places}
        return {role: _GetWeight.apply(anchor, bucket, i) for role, bucket, i in self._places}  # type: ignore[no-untyped-call]

    def _never_saving_weights(self) -> AbstractContextManager[object]:
        """Autograd stores a handle in place of a gathered weight, or the storage would outlive `close`."""
        discarding = [bucket for bucket in self.buckets if bucket.discards]
        if not discarding:
            return nullcontext()

        def pack(tensor: Tensor) -> object:
            for bucket in discarding:
                if bucket.owns(tensor):
                    return bucket, tensor.shape, tensor.stride(), tensor.storage_offset()
            return tensor

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            bucket, shape, stride, offset = packed
            view: Tensor = bucket.view(shape, stride, offset)
            return view

        return saved_tensors_hooks(pack, unpack)


class _GetWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, bucket: Bucket, index: int) -> Tensor:
        ctx.bucket, ctx.index = bucket, index
        return bucket.weight(index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.bucket.add_gradient(ctx.index, gradient)
        return None, None, None


class Stage:
    """The units of one pipeline stage."""

    def __init__(self, units: Sequence[RunUnit]):
        self.units = list(units)

    def forward(self, x: Tensor, index: int, microbatch: Microbatch, keep: bool) -> Tensor:
        for unit in self.units:
            x = unit.forward(x, index, microbatch, keep)
        return x

    def backward(self, gradient: Tensor, index: int) -> Tensor | None:
        into: Tensor | None = gradient
        for unit in reversed(self.units):
            assert into is not None, f"{unit.name} has no gradient to start from"
            into = unit.backward(into, index)
        return into
