"""What ranks do together: the engine's collectives by group, size and tier, messages, and compute beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trigrid.check.calibrate_fit import fit_wire
from trigrid.check.calibrate_meter import Meter, ends_first
from trigrid.engine.comm import Comm, Group
from trigrid.plan.measured import Wire, WireKind
from trigrid.spec.cluster import Tier

SIZES = {"cpu": tuple(4**n for n in range(6, 13)), "cuda": tuple(4**n for n in range(7, 15))}
AXES = ("tp", "zero")
COLLECTIVES: tuple[WireKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ELEMENT_BYTES = 4
# Beside how large a reduction compute is timed, and the side of the products.
BESIDE_BYTES, SIDE = {"cpu": 2**23, "cuda": 2**28}, {"cpu": 256, "cuda": 4096}


class Placed(NamedTuple):
    """What tells groups apart: ranks, those in one node (1 inside a node), and the farthest tier."""

    ranks: int
    inside: int
    tier: Tier


def placed(comm: Comm, group: Group) -> Placed:
    """Where the largest group of the axis of `group` sits."""
    node = comm.grid.cluster.gpus_per_node
    first = comm.grid.group(group.axis, 0)
    nodes = len({rank // node for rank in first})
    return Placed(len(first), len(first) // nodes if nodes > 1 else 1, comm.grid.tier(first))


def measure_wires(meter: Meter, comms: list[Comm], seconds: float) -> tuple[Wire, ...]:
    """Wires of every kind of group of the layouts that `comms` are of, and between neighbours."""
    todo: list[tuple[Comm, str, Placed]] = []
    for comm in comms:
        for axis in AXES:
            place = placed(comm, comm.group(axis))
            if place.ranks > 1 and all(place != known for _, _, known in todo):
                todo.append((comm, axis, place))
    pairs = list(_neighbours(comms[0]))
    share = seconds / (len(todo) * len(COLLECTIVES) + len(pairs) + 1)
    wires = []
    for comm, axis, place in todo:
        for kind in COLLECTIVES:
            points = []
            what = f"{kind} of {place.ranks} ranks ({place.tier.name.lower()})"
            for size, within in meter.within(what, ends_first(SIZES[meter.device.type]), share):
                points.append((size, meter.seconds(collective(kind, comm, axis, size, meter.device), within)))
            wires.append(fit_wire(kind, place.tier, place.ranks, place.inside, tuple(sorted(points))))
    for tier, partner in pairs:
        points = []
        for size, within in meter.within(
            f"messages ({tier.name.lower()})", ends_first(SIZES[meter.device.type]), share
        ):
            points.append((size, meter.seconds(ping_pong(comms[0].rank, partner, size, meter.device), within) / 2))
        wires.append(fit_wire("message", tier, 2, 1, tuple(sorted(points))))
    return tuple(wires)


def collective(kind: WireKind, comm: Comm, axis: str, size: int, device: torch.device) -> Callable[[], object]:
    """The engine's own call; of an all-to-all, which it lacks, torch's."""
    group = comm.group(axis)
    numel = max(1, size // ELEMENT_BYTES // group.size) * group.size
    whole = torch.zeros(numel, device=device)
    if kind == "all_reduce":
        return lambda: comm.all_reduce(whole, axis)
    if kind == "all_gather":
        return lambda: comm.all_gather(whole[: numel // group.size], axis)
    if kind == "reduce_scatter":
        return lambda: comm.reduce_scatter(whole, axis)
    other = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(other, whole, group=group.handle)


def _neighbours(comm: Comm) -> Iterator[tuple[Tier, int | None]]:
    """For each tier between neighbours, inside a node, from node to node and from leaf to leaf, this rank's partner if
    it has one."""
    grid, rank = comm.grid, comm.rank
    node = grid.cluster.gpus_per_node
    for distance in dict.fromkeys((1, node, node * grid.cluster.nodes_per_leaf)):
        if distance < grid.world:
            partner = rank + distance if rank // distance % 2 == 0 else rank - distance
            yield grid.tier((0, distance)), partner if partner < grid.world else None


def ping_pong(rank: int, partner: int | None, size: int, device: torch.device) -> Callable[[], object]:
    """A message of `size` bytes to `partner` and back; nothing where there is none."""
    tensor = torch.zeros(max(1, size // ELEMENT_BYTES), device=device)

    def call() -> None:
        if partner is None:
            return
        first, second = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)
        first(tensor, partner)
        second(tensor, partner)

    return call


def measure_overlap(meter: Meter, comm: Comm, seconds: float) -> float:
    """How much longer compute takes while a reduction runs beside it: 1 where both are as fast as alone, 2 where they
    take turns."""
    axis = next(axis for axis in (*AXES, "world") if comm.group(axis).size > 1)
    kind = meter.device.type
    whole = torch.zeros(BESIDE_BYTES[kind] // ELEMENT_BYTES, device=meter.device)
    a = torch.randn(SIDE[kind], SIDE[kind], device=meter.device)
    meter.progress("compute beside a reduction", 0, 1)
    link = meter.seconds(lambda: comm.all_reduce(whole, axis), seconds / 3)
    one = meter.seconds(lambda: a @ a, seconds / 6)
    products = max(1, round(link / one))

    def compute() -> Tensor:
        for _ in range(products - 1):
            a @ a
        return a @ a

    def both() -> None:
        pending = comm.all_reduce_start(whole, axis)
        compute()
        pending.wait()

    alone, together = meter.seconds(compute, seconds / 6), meter.seconds(both, seconds / 3)
    return min(2.0, max(1.0, 1 + (together - max(alone, link)) / min(alone, link)))
