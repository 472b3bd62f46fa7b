"""A pipeline stage as a list of units.

Autograd runs per unit: its input is detached, its graph ends at its output. So gathering ahead, recomputing, reducing
and discarding are steps of the visible loops of `Stage`, without module hooks. A unit boundary is a recompute boundary.

There is no leaf parameter and no `.grad`: a weight enters a unit through `_GetWeight`, whose backward adds the
gradient to the bucket. Products do not make gradients of their weights but hand over what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from trigrid.blueprint.buckets import UnitBuckets
from trigrid.engine.handover import Factors, Handover, Sink
from trigrid.engine.zero import Bucket


@dataclass(frozen=True, eq=False)
class Microbatch:
    """tokens_SB and labels_SB of one microbatch (labels of −100 are ignored); scale: 1 ÷ the global number of valid
    tokens. documents_SB numbers the documents of each row: a token attends within its own; None: to all before it.
    samples_B numbers the rows among all samples of the run, by which dropout draws; None: nothing is dropped."""

    tokens_SB: Tensor
    labels_SB: Tensor
    scale: Tensor
    documents_SB: Tensor | None = None
    samples_B: Tensor | None = None


UnitFunction = Callable[[Mapping[str, Tensor], Tensor, Microbatch], Tensor]
"""(weights by role, input, microbatch) → output. The embedding ignores its input, the head returns the scaled loss."""


@dataclass(frozen=True)
class _Saved:
    """What a forward leaves for the backward: the input, and the graph's end unless it is recomputed."""

    x: Tensor
    edge: GradientEdge | None
    microbatch: Microbatch


class Place(NamedTuple):
    """Entries of a bucket, from `first` to `last`, that are one weight to a unit."""

    bucket: Bucket
    first: int
    last: int

    @property
    def weight(self) -> Tensor:
        return self.bucket.weight(self.first, self.last)

    def add_gradient(self, gradient: Tensor) -> None:
        self.bucket.add_gradient(self.first, self.last, gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        self.bucket.add_product(self.first, self.last, left, right)


def joined(places: Mapping[str, Place], together: Iterable[Sequence[str]]) -> dict[str, Place]:
    """`places` by role, where those roles that are asked for `together` are one, called "q+k+v", if they lie one after
    the other: one product then has the outputs of all."""
    found = dict(places)
    for roles in together:
        groups = [[role + end for role in roles if role + end in places] for end in ("", "_bias")]
        if groups[0] == [*roles] and all(_neighbours([places[role] for role in group]) for group in groups):
            for group in filter(None, groups):
                first, *_, last = (found.pop(role) for role in group)
                found["+".join(group)] = Place(first.bucket, first.first, last.last)
    return found


def _neighbours(places: Sequence[Place]) -> bool:
    return all(a.bucket is b.bucket and a.last + 1 == b.first for a, b in pairwise(places))


class _Later(NamedTuple):
    """What an input backward leaves for the weight backward: factors, and gradients that were cheap enough to be
    computed at once."""

    factors: list[Factors]
    gradients: list[tuple[Place, Tensor]]


class RunUnit:
    """A unit with its function and the places of its weights by role. `Stage` opens the buckets.

    handover: from the products of its function.
    """

    def __init__(
        self,
        placed: UnitBuckets,
        function: UnitFunction,
        places: Mapping[str, Place],
        recompute: bool,
        handover: Handover,
    ):
        self.name = placed.unit.name
        self.embeds = placed.unit.kind == "embedding"
        self.has_backward = placed.backward
        self.buckets = list({id(place.bucket): place.bucket for place in places.values()}.values())
        self._function = function
        self._places = places
        self._recompute = recompute
        self._handover = handover
        self._saved: dict[int, _Saved] = {}
        self._later: dict[int, _Later] = {}
        self._aside: list[tuple[Place, Tensor]] | None = None

    def forward(self, x: Tensor, index: int, microbatch: Microbatch, keep: bool) -> Tensor:
        """Run on microbatch number `index`; with `keep`, remember what its backward needs."""
        keep = keep and self.has_backward
        if keep:
            x = x.detach()
            if x.is_floating_point():
                x.requires_grad_()
        if keep and not self._recompute:
            y = self._with_graph(x, microbatch)
            self._saved[index] = _Saved(x, get_gradient_edge(y), microbatch)
            return y.detach()
        with torch.no_grad():
            y = self._function(Weights(self, self._places, None), x, microbatch)
        if keep:
            self._saved[index] = _Saved(x, None, microbatch)
        return y

    def backward(self, gradient: Tensor, index: int) -> Tensor | None:
        """Gradient of the output → gradient of the input (None for the embedding); weights' gradients go to the
        buckets."""
        saved = self._saved.pop(index)
        edge = saved.edge
        if edge is None:
            edge = get_gradient_edge(self._with_graph(saved.x, saved.microbatch))
        torch.autograd.backward([edge], [gradient])
        return saved.x.grad

    def input_backward(self, gradient: Tensor, index: int) -> Tensor | None:
        """As `backward`, but the weights' gradients wait for `weight_backward`."""
        later = self._later[index] = _Later([], [])
        self._aside = later.gradients
        with self._handover.into(later.factors):
            into = self.backward(gradient, index)
        self._aside = None
        return into

    def weight_backward(self, index: int) -> None:
        """What `input_backward` has put off."""
        later = self._later.pop(index)
        for place, gradient in later.gradients:
            place.add_gradient(gradient)
        for factors in later.factors:
            factors.multiply()

    @property
    def under_way(self) -> bool:
        """Whether any microbatch's backward, or the second half of it, is still to come."""
        return bool(self._saved or self._later)

    def queued(self) -> list[Tensor]:
        """Every tensor that waits for a weight backward."""
        later = self._later.values()
        factors = [t for held in later for item in held.factors for t in (item.x, *item.grads)]
        return factors + [gradient for held in later for _, gradient in held.gradients]

    def take_gradient(self, place: Place, gradient: Tensor) -> None:
        """The gradient of a weight, from its graph."""
        if self._aside is not None:
            self._aside.append((place, gradient))
        else:
            place.add_gradient(gradient)

    def _with_graph(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        with torch.enable_grad(), self._never_saving_weights():
            # A leaf that stays without gradient: it only makes autograd visit the weights.
            anchor = torch.zeros((), device=x.device, requires_grad=True)
            return self._function(Weights(self, self._places, anchor), x, microbatch)

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


class Weights(Mapping[str, Tensor]):
    """The weights of a unit by role.

    Each enters the graph when it is asked for, just before its use: of the nodes that are ready, autograd runs the one
    made last, so a gradient goes to its bucket as soon as it is there. Without an anchor there is no graph.
    """

    def __init__(self, unit: RunUnit, places: Mapping[str, Place], anchor: Tensor | None):
        self._unit, self._places, self._anchor = unit, places, anchor

    def __getitem__(self, role: str) -> Tensor:
        place = self._places[role]
        if self._anchor is None or place.bucket.frozen:
            return place.weight
        return _GetWeight.apply(self._anchor, self._unit, place)  # type: ignore[no-untyped-call, no-any-return]

    def factor(self, role: str) -> tuple[Tensor, Sink | None]:
        """The same weight outside of the graph, for a product that hands over what its gradient is made of, and where
        that goes, if anywhere."""
        place = self._places[role]
        return place.weight, None if self._anchor is None or place.bucket.frozen else place

    def __contains__(self, role: object) -> bool:
        return role in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _GetWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, unit: RunUnit, place: Place) -> Tensor:
        ctx.unit, ctx.place = unit, place
        ctx.set_materialize_grads(False)
        return place.weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None]:
        if gradient is not None:
            ctx.unit.take_gradient(ctx.place, gradient)
        return None, None, None


class Stage:
    """The units of one pipeline stage.

    A bucket stays open from a unit to the next if both use it. While a unit computes, the weights of the `prefetch`
    units that follow are gathered.
    """

    def __init__(self, units: Sequence[RunUnit], prefetch: int):
        self.units = list(units)
        self._prefetch = prefetch
        self._embedded: dict[int, Tensor | None] = {}

    def forward_start(self) -> None:
        """Begin to gather what a forward needs first."""
        _gather_ahead(self.units[:1])

    def forward(self, x: Tensor, index: int, microbatch: Microbatch, keep: bool) -> Tensor:
        for unit, following in self._opened(self.units):
            x = unit.forward(x, index, microbatch, keep)
            _leave(unit, following)
        return x

    def backward_start(self) -> None:
        """Begin to gather what a backward, whole or of the input, needs first."""
        _gather_ahead(self._backwards[:1])

    def backward(self, gradient: Tensor, index: int) -> Tensor | None:
        into: Tensor | None = gradient
        for unit, following in self._opened(self._backwards):
            assert into is not None, f"{unit.name} has no gradient to start from"
            for bucket in unit.buckets:
                bucket.open_gradients()
            into = unit.backward(into, index)
            for bucket in _leave(unit, following):
                bucket.close_gradients()
        return into

    def input_backward(self, gradient: Tensor, index: int) -> Tensor | None:
        """The half of `backward` that the stage before waits for. An embedding has no such half."""
        into: Tensor | None = gradient
        for unit, following in self._opened([unit for unit in self._backwards if not unit.embeds]):
            assert into is not None, f"{unit.name} has no gradient to start from"
            into = unit.input_backward(into, index)
            _leave(unit, following)
        if any(unit.embeds for unit in self._backwards):
            self._embedded[index] = into
        return into

    def weight_backward(self, index: int) -> None:
        """The other half."""
        into = self._embedded.pop(index, None)
        for unit, following in _with_following(self._backwards):
            for bucket in unit.buckets:
                bucket.open_gradients()
            if unit.embeds:
                assert into is not None
                for bucket in unit.buckets:
                    bucket.open()
                unit.backward(into, index)
                _leave(unit, following)
            else:
                unit.weight_backward(index)
            for bucket in _left(unit, following):
                bucket.close_gradients()

    def queued(self) -> list[Tensor]:
        """Every tensor that waits for a weight backward."""
        waiting = [into for into in self._embedded.values() if into is not None]
        return waiting + [tensor for unit in self.units for tensor in unit.queued()]

    @property
    def _backwards(self) -> list[RunUnit]:
        return [unit for unit in reversed(self.units) if unit.has_backward]

    def _opened(self, units: Sequence[RunUnit]) -> Iterator[tuple[RunUnit, RunUnit | None]]:
        """Each unit, open, with the one that follows."""
        for at, (unit, following) in enumerate(_with_following(units)):
            for bucket in unit.buckets:
                bucket.open()
            _gather_ahead(units[at + 1 : at + 1 + self._prefetch])
            yield unit, following


def _with_following(units: Sequence[RunUnit]) -> Iterator[tuple[RunUnit, RunUnit | None]]:
    return zip_longest(units, units[1:])


def _gather_ahead(units: Sequence[RunUnit]) -> None:
    for unit in units:
        for bucket in unit.buckets:
            bucket.open_start()


def _left(unit: RunUnit, following: RunUnit | None) -> list[Bucket]:
    """The buckets that the following unit does not use."""
    return [bucket for bucket in unit.buckets if following is None or bucket not in following.buckets]


def _leave(unit: RunUnit, following: RunUnit | None) -> list[Bucket]:
    """Close the buckets that the following unit does not use, and return them."""
    left = _left(unit, following)
    for bucket in left:
        bucket.close()
    return left
