"""What ranks measure together: the collectives of each axis, messages in pairs, products, the clocks of nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from trigrid.check.calibrate_meter import Meter
from trigrid.check.calibrate_network import collective, ping_pong
from trigrid.engine.comm import Comm
from trigrid.plan.measured import WireKind, ring_terms

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

COLLECTIVES: tuple[WireKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
AXES = ("tp", "zero", "replicate")
COLLECTIVE_BYTES, PAIR_BYTES = {"cpu": 2**22, "cuda": 2**28}, {"cpu": 2**20, "cuda": 2**26}
LONGEST_PAIR_S = 0.5
MOST_ROUNDS = {"cpu": 64, "cuda": 16}
"""NCCL makes a communicator for each pair that talks, which takes memory."""
EXCHANGES, MOST_NODES = 8, 256
Pairing = list[tuple[int, int]]


class Sent(NamedTuple):
    """A message of PAIR_BYTES between two ranks, one way. between: nodes, or ranks of one node."""

    low: int
    high: int
    seconds: float
    between: bool


class Skew(NamedTuple):
    """How far the clock of a node is ahead of the first one's, known to `error_s`."""

    host: str
    offset_s: float
    error_s: float


def busbw(kind: WireKind, size_bytes: int, ranks: int, seconds: float) -> float:
    """Bytes a second of the busiest link, by the convention of nccl-tests (doc/PERFORMANCE.md): size ÷ time, times
    2(n − 1)/n for an all-reduce, (n − 1)/n for an all-gather and a reduce-scatter, 1 for a message."""
    return size_bytes / seconds * ring_terms(kind, ranks, 1)[1]


def measure_axes(meter: Meter, comm: Comm, seconds: float) -> dict[tuple[str, WireKind], float]:
    """This rank's seconds of each collective over each axis of the grid, all groups at once as in training."""
    axes = [axis for axis in AXES if comm.grid.largest(axis) > 1]
    todo = [(axis, kind) for axis in axes for kind in COLLECTIVES]
    size = COLLECTIVE_BYTES[meter.device.type]
    found = {}
    for (axis, kind), within in meter.within("collectives", todo, seconds):
        found[axis, kind] = meter.own(collective(kind, comm, axis, size, meter.device), within)
    return found


def tournament(members: Sequence[int]) -> list[Pairing]:
    """Rounds in which each meets every other once, at most one at a time (the circle method)."""
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        # The first stays, the others move on by one.
        ring[1:] = [ring[-1], *ring[1:-1]]
    return rounds


def pairings(nodes: Sequence[Sequence[int]], rails: bool) -> list[tuple[bool, Pairing]]:
    """Rounds of pairs of ranks, those between nodes marked. rails: the ranks of a node have a NIC each, so all of them
    speak at once, each with its like; else only the first one does."""
    near: list[Pairing] = []
    for ranks in nodes:
        for number, pairs in enumerate(tournament(ranks)):
            if number == len(near):
                near.append([])
            near[number] += pairs
    far = []
    for meeting in tournament(range(len(nodes))):
        pairs = [pair for a, b in meeting for pair in zip(nodes[a], nodes[b], strict=False)]
        firsts = [(nodes[a][0], nodes[b][0]) for a, b in meeting]
        far.append(pairs if rails else firsts)
    return [(False, pairs) for pairs in near] + [(True, pairs) for pairs in far]


def measure_pairs(
    meter: Meter, rank: int, rounds: Sequence[tuple[bool, Pairing]], seconds: float
) -> tuple[list[Sent], int]:
    """What this rank, the lower one of its pairs, has measured, and in how many of `rounds`: in all of them if there is
    time, else in some of both kinds."""
    most, size = MOST_ROUNDS[meter.device.type], PAIR_BYTES[meter.device.type]
    # The same on all ranks; those that are left out are any.
    chosen = Random(0).sample(rounds, min(most, len(rounds)))
    far = next((item for item in rounds if item[0]), None)
    chosen = [far, *(item for item in chosen if item is not far)] if far else chosen
    found, done = [], 0
    for (between, pairs), within in meter.within("messages", chosen, seconds):
        partner = {a: b for a, b in pairs} | {b: a for a, b in pairs}
        spent_s = meter.own(ping_pong(rank, partner.get(rank), size, meter.device), min(within, LONGEST_PAIR_S)) / 2
        done += 1
        if partner.get(rank, -1) > rank:
            found.append(Sent(rank, partner[rank], spent_s, between))
    return found, done


def measure_neighbours(meter: Meter, comm: Comm, seconds: float) -> dict[int, float]:
    """Seconds of a message to the next pipeline rank, by that rank; of this rank, which has at most one."""
    group, size, found = comm.group("pp"), COLLECTIVE_BYTES[meter.device.type], {}
    for parity in (0, 1) if comm.grid.layout.pp > 1 else ():
        place = group.index + (1 if group.index % 2 == parity else -1)
        partner = group.ranks[place] if 0 <= place < group.size else None
        spent_s = meter.own(ping_pong(comm.rank, partner, size, meter.device), seconds / 2) / 2
        if partner is not None and place > group.index:
            found[partner] = spent_s
    return found


def measure_skew(store: Store, rank: int, leaders: dict[str, int]) -> list[Skew]:
    """The clocks of nodes, `leaders` being a rank of each, the first rank's first; on other ranks than that, nothing.

    NTP's formula (RFC 5905, section 8): θ = ((t1 − t0) + (t2 − t3)) / 2, wrong by half of the delay at most, by the
    exchange of the least delay of a few.
    """
    others = _spread(list(leaders.items())[1:], MOST_NODES)
    if rank != 0:
        if rank in [leader for _, leader in others]:
            for number in range(EXCHANGES):
                store.wait([f"asked {rank} {number}"])
                store.set(f"told {rank} {number}", json.dumps((time.time(), time.time())))
        return []
    found = []
    for host, leader in others:
        exchanges = []
        for number in range(EXCHANGES):
            t0 = time.time()
            store.set(f"asked {leader} {number}", "")
            t1, t2 = json.loads(store.get(f"told {leader} {number}"))
            exchanges.append(offset(t0, t1, t2, time.time()))
        found.append(Skew(host, *min(exchanges, key=lambda exchange: exchange[1])))
    return found


def offset(t0: float, t1: float, t2: float, t3: float) -> tuple[float, float]:
    """How far the other clock is ahead, and how wrong that may be: asked at t0, heard and answered at t1 and t2 by the
    other clock, back at t3."""
    return ((t1 - t0) + (t2 - t3)) / 2, ((t3 - t0) - (t2 - t1)) / 2


def _spread(items: list[tuple[str, int]], most: int) -> list[tuple[str, int]]:
    every = max(1, -(-len(items) // most))
    return items[::every]


def by_rank(sent: Sequence[Sent]) -> Iterator[tuple[int, list[float]]]:
    """For each rank the seconds of all its messages."""
    found: dict[int, list[float]] = {}
    for message in sent:
        for rank in (message.low, message.high):
            found.setdefault(rank, []).append(message.seconds)
    yield from found.items()
