"""Several sweeps of a calibration as one: the median of each point, fitted again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trigrid.check.calibrate_fit import fit_attention, fit_passes, fit_products, fit_wire
from trigrid.plan.measured import Attention, Launch, Operation, Passes, Points, Products, Wire


@dataclass(frozen=True)
class Sweep:
    """What one round over everything has measured, by number format where it depends on one. slowdown: see
    `measure_overlap`; 1 without wires."""

    products: Mapping[str, Products]
    attention: Mapping[str, Attention]
    operations: Mapping[str, Mapping[str, Operation]]
    passes: Passes
    launch: Launch
    wires: tuple[Wire, ...] = ()
    slowdown: float = 1.0


def combined(sweeps: Sequence[Sweep]) -> Sweep:
    """The sweeps, of the same things, as one; a point that only some have is the median of these."""
    first = sweeps[0]
    return Sweep(
        products={name: fit_products(_points([s.products[name].points for s in sweeps])) for name in first.products},
        attention={
            name: fit_attention(_points([s.attention[name].points for s in sweeps], results=2))
            for name in first.attention
        },
        operations={
            name: {which: _operation([s.operations[name][which] for s in sweeps]) for which in operations}
            for name, operations in first.operations.items()
        },
        passes=fit_passes(_points([s.passes.points for s in sweeps])),
        launch=Launch(median(s.launch.seconds for s in sweeps), first.launch.blocking),
        wires=tuple(_wire(of) for of in zip(*(s.wires for s in sweeps), strict=True)),
        slowdown=median(s.slowdown for s in sweeps),
    )


def _points(sweeps: Iterable[Points], results: int = 1) -> Points:
    """Points of which all but the last `results` numbers are equal, as one with the medians of these."""
    found: dict[tuple[float, ...], list[tuple[float, ...]]] = defaultdict(list)
    for points in sweeps:
        for point in points:
            found[point[:-results]].append(point[-results:])
    return tuple((*known, *map(median, zip(*spent, strict=True))) for known, spent in found.items())


def _operation(sweeps: Sequence[Operation]) -> Operation:
    both = ([one.forward for one in sweeps], [one.backward for one in sweeps])
    forward, backward = (tuple(sorted(_points(points))) for points in both)
    return Operation(forward, backward)


def _wire(sweeps: tuple[Wire, ...]) -> Wire:
    one = sweeps[0]
    points = tuple(sorted(_points([wire.points for wire in sweeps])))
    return fit_wire(one.kind, one.tier, one.ranks, one.inside, points)
