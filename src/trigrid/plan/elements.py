"""Elements of each bucket of a unit on one TP rank, which engine/buckets cuts in the same way."""

from __future__ import annotations

from typing import NamedTuple

from trigrid.blueprint.decoder import Unit
from trigrid.blueprint.parameters import localise
from trigrid.spec.layout import Layout


class Bucket(NamedTuple):
    """Elements of one bucket on one TP rank: dense ones, and those of routed experts, which another group shares."""

    name: str
    dense: int
    experts: int


def unit_buckets(unit: Unit, tp: int, ep: int) -> tuple[Bucket, ...]:
    """The buckets of `unit`: one, and one more for what is tied."""
    held: dict[str, list[int]] = {}
    layout = Layout(tp=tp)
    for parameter in unit.parameters:
        numel = localise(parameter, layout, 0).numel
        sizes = held.setdefault("tied" if parameter.tied else unit.kind, [0, 0])
        sizes[parameter.role.startswith("expert")] += numel
    return tuple(Bucket(name, dense, experts // ep) for name, (dense, experts) in held.items())
