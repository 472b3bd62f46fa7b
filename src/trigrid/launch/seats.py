"""Where the ranks really are: an order of them in which the grid meets the machine, and what is wrong with it.

A launcher counts its ranks by its own rules: Slurm by the names of nodes, torchrun by who came first, Kubernetes by
pods that may run anywhere. So each rank tells its seat before it joins, and the first one counts them anew: all ranks
of a node follow each other, and so do the nodes of a leaf. Its own node comes first, so that it stays the first rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from trigrid.errors import Problem, Refused
from trigrid.grid import Grid
from trigrid.launch.hosts import KEY, Switches, in_order
from trigrid.launch.place import host_of
from trigrid.report.console import some
from trigrid.spec.cluster import Tier
from trigrid.spec.layout import AXES, Axis

SHOWN = 8
"""Nodes, and faults, that are told one by one."""
WHERE = {Tier.LOCAL: "", Tier.NVLINK: "inside nodes", Tier.LEAF: "between nodes", Tier.SPINE: "across leaves"}
"""What a group crosses, in words."""


@dataclass(frozen=True)
class Seat:
    """Where a rank runs. rank: as its launcher counts; switches: above its host, from the spine to the leaf, () where
    they are not known; device: "cpu", or the name of a GPU; trouble: why it cannot train there, if it cannot."""

    rank: int
    host: str
    switches: tuple[str, ...]
    device: str
    trouble: str = ""


@dataclass(frozen=True)
class Seating:
    """The seat of each rank of the grid, in its order."""

    seats: tuple[Seat, ...]

    @cached_property
    def hosts(self) -> dict[str, list[int]]:
        """Host → its ranks, in order."""
        found: dict[str, list[int]] = {}
        for rank, seat in enumerate(self.seats):
            found.setdefault(seat.host, []).append(rank)
        return found

    def tier(self, ranks: Sequence[int]) -> Tier:
        """The slowest network between any two of `ranks`; nodes whose switches are not known share a leaf."""
        seats = [self.seats[rank] for rank in ranks]
        if len(seats) < 2:
            return Tier.LOCAL
        if len({seat.host for seat in seats}) == 1:
            return Tier.NVLINK
        return Tier.LEAF if len({seat.switches for seat in seats}) == 1 else Tier.SPINE

    def worst(self, grid: Grid, axis: Axis) -> tuple[Tier, tuple[int, ...]]:
        """The slowest tier over the groups of `axis`, and a group that crosses it."""
        return max(((self.tier(group), group) for group in grid.groups(axis)), key=lambda found: found[0])


def seat_of(env: Mapping[str, str], rank: int, device: str, trouble: str) -> Seat:
    """The seat of this process, with the switches that Slurm tells."""
    address, pattern = env.get("SLURM_TOPOLOGY_ADDR", ""), env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    switches = tuple(address.split(".")[: pattern.count("switch")])
    return Seat(rank, host_of(env), switches, device, trouble)


def arrange(seats: Iterable[Seat], topology: Switches | None = None) -> Seating:
    """The order of the ranks. topology: stands in for the switches that the seats tell. Raises Refused where it lacks a
    host."""
    seats = sorted(seats, key=lambda seat: seat.rank)
    if topology is not None:
        if missing := sorted({seat.host for seat in seats} - topology.keys(), key=in_order):
            reason = f"lacks {some(missing)}"
            raise Refused([Problem(KEY, f"{len(topology)} nodes", reason)])
        seats = [replace(seat, switches=topology[seat.host]) for seat in seats]
    first = seats[0]

    def turn(seat: Seat) -> tuple[object, ...]:
        shared = 0
        for mine, other in zip(first.switches, seat.switches, strict=False):
            if mine != other:
                break
            shared += 1
        way = tuple(map(in_order, seat.switches))
        return seat.host != first.host, -shared, way, in_order(seat.host), seat.rank

    return Seating(tuple(sorted(seats, key=turn)))


def faults(seating: Seating, grid: Grid) -> list[Problem]:
    """Why the job cannot train where its ranks are: broken nodes, or tensor parallelism between nodes that the job,
    by `cluster.gpus_per_node`, has inside them."""
    troubles = {(seat.host, seat.trouble): None for seat in seating.seats if seat.trouble}
    found = [Problem("node", host, trouble) for host, trouble in list(troubles)[:SHOWN]]
    if len(troubles) > SHOWN:
        found.append(Problem("nodes", len(troubles), "have such faults"))
    without = sorted({seat.host for seat in seating.seats if seat.device == "cpu"}, key=in_order)
    if without and len(without) < len(seating.hosts) and not troubles:
        reason = "other nodes have CUDA devices, and this one shows none: see what `nvidia-smi` says there"
        found += [Problem("node", host, reason) for host in without[:SHOWN]]
    tier, group = seating.worst(grid, "tp")
    if tier > Tier.NVLINK and grid.worst_tier("tp") <= Tier.NVLINK:
        found.append(_crossing(seating, grid, group))
    return found


def _crossing(seating: Seating, grid: Grid, group: tuple[int, ...]) -> Problem:
    counts = [len(ranks) for ranks in seating.hosts.values()]
    nodes = ", ".join(dict.fromkeys(seating.seats[rank].host for rank in group))
    per_node = _counts(seating)
    whole = gcd(*counts)
    legal = tuple(tp for tp in range(1, grid.layout.tp) if whole % tp == 0 and grid.layout.tp % tp == 0)
    reason = (
        f"ranks {group[0]} to {group[-1]} of a tensor-parallel group are on {nodes}, since nodes have {per_node}: it "
        "exchanges activations several times per layer and belongs inside a node. Start a multiple of tp on every node "
        f"(Slurm: --ntasks-per-node), or say cluster.gpus_per_node = {whole} to train nevertheless"
    )
    return Problem("parallel.tp", grid.layout.tp, reason, legal)


def cautions(seating: Seating, grid: Grid) -> list[Problem]:
    """What slows the job down where its ranks are."""
    found = []
    if len({len(ranks) for ranks in seating.hosts.values()}) > 1:
        found.append(Problem("nodes", len(seating.hosts), f"are uneven: they have {_counts(seating)}"))
    devices: dict[str, list[str]] = {}
    for host, ranks in seating.hosts.items():
        for device in sorted({seating.seats[rank].device for rank in ranks}):
            devices.setdefault(device, []).append(host)
    if len(devices) > 1:
        told = "; ".join(f"{device} on {some(hosts)}" for device, hosts in devices.items())
        found.append(Problem("nodes", len(seating.hosts), f"differ, and all wait for the slowest: {told}"))
    tier, group = seating.worst(grid, "pp")
    planned = grid.worst_tier("pp")
    if tier > max(planned, Tier.NVLINK):
        ends = f"{seating.seats[group[0]].host} to {seating.seats[group[-1]].host}"
        if tier == Tier.SPINE:
            reason = (
                f"stages {WHERE[tier]} ({ends}): a stage boundary does not overlap with other work; ask the "
                "scheduler for neighbouring nodes (Slurm: --switches)"
            )
            found.append(Problem("parallel.pp", grid.layout.pp, reason))
        else:
            per_node = max(len(ranks) for ranks in seating.hosts.values())
            reason = f"stages are {WHERE[tier]} ({ends}), and are planned inside a node"
            found.append(Problem("cluster.gpus_per_node", grid.cluster.gpus_per_node, reason, (per_node,)))
    return found


def picture(seating: Seating, grid: Grid, launcher: str) -> str:
    """The nodes with their ranks and coordinates, in a few lines, and which network each axis crosses."""
    hosts = list(seating.hosts)
    known = any(seat.switches for seat in seating.seats)
    lines = [f"{grid.world:,} ranks on {len(hosts):,} nodes, in the order of their {'switches' if known else 'names'}:"]
    shown = hosts if len(hosts) <= SHOWN + 2 else [*hosts[:SHOWN], hosts[-1]]
    leaves = {host: ".".join(seating.seats[seating.hosts[host][0]].switches) for host in shown}
    names, ways = (max(map(len, words)) for words in (shown, leaves.values()))
    for host in shown:
        if host == hosts[-1] and len(shown) < len(hosts):
            lines.append(f"  … {len(hosts) - len(shown):,} nodes more")
        ranks = seating.hosts[host]
        cells = [f"{leaves[host]:<{ways}}"] if known else []
        cells += [f"{host:<{names}}", f"ranks {span(ranks)}"]
        cells += [
            f"{axis} {span(sorted({getattr(grid.coord(rank), axis) for rank in ranks}))}"
            for axis in AXES
            if grid.layout.degree(axis) > 1
        ]
        theirs = [seating.seats[rank].rank for rank in ranks]
        moved = f"  ({launcher}'s {span(theirs)})" if theirs != ranks else ""
        lines.append(f"  {'  '.join(cells)}{moved}")
    crossed = [
        f"{axis} {WHERE[seating.worst(grid, axis)[0]]}" for axis in reversed(AXES) if grid.layout.degree(axis) > 1
    ]
    return "\n".join([*lines, f"  {', '.join(crossed)}"])


def _counts(seating: Seating) -> str:
    """How many nodes have how many ranks."""
    counts: dict[int, list[str]] = {}
    for host, ranks in seating.hosts.items():
        counts.setdefault(len(ranks), []).append(host)
    return ", ".join(f"{count} ranks ({some(hosts)})" for count, hosts in sorted(counts.items(), reverse=True))


def span(numbers: Sequence[int]) -> str:
    """0–3 for numbers that follow each other, else each of them."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}–{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:SHOWN]))
    return f"{shown} …" if len(numbers) > SHOWN else shown
