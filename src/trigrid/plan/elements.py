"""Elements of each bucket of a unit on one TP rank, which engine/buckets cuts in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trigrid.blueprint.decoder import Unit
from trigrid.blueprint.parameters import localise
from trigrid.spec.layout import Layout


class Bucket(NamedTuple):
    """Elements of one bucket on one TP rank: dense ones, and those of routed experts, which another group shares.
    frozen: they are not trained."""

    name: str
    dense: int
    experts: int
    frozen: bool

    @property
    def numel(self) -> int:
        return self.dense + self.experts


def unit_buckets(unit: Unit, tp: int, ep: int, frozen: frozenset[str]) -> tuple[Bucket, ...]:
    """The buckets of `unit`: one, and more for what is tied and for what is `frozen`, by their roles."""
    held: dict[tuple[str, bool], list[int]] = {}
    layout = Layout(tp=tp)
    for parameter in unit.parameters:
        numel = localise(parameter, layout, 0).numel
        sizes = held.setdefault(("tied" if parameter.tied else unit.kind, parameter.role in frozen), [0, 0])
        sizes[parameter.role.startswith("expert")] += numel
    return tuple(Bucket(name, dense, experts // ep, still) for (name, still), (dense, experts) in held.items())


def trained_numel(buckets: Sequence[Bucket]) -> int:
    """Elements of which there are gradients."""
    return sum(bucket.numel for bucket in buckets if not bucket.frozen)
