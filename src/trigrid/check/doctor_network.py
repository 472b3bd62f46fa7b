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


class Round(NamedTuple):
    """between: of nodes, each with one other, or of the ranks of every node."""

    between: bool
    number: int


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


def meetings(count: int) -> int:
    """Rounds in which each of `count` meets every other once, and nobody two at a time."""
    return count - 1 + count % 2 if count > 1 else 0


def meeting(members: Sequence[int], number: int) -> Pairing:
    """The pairs of round `number` (the circle method): the first stays, the others have moved on by so many."""
    even: list[int | None] = [*members, *[None] * (len(members) % 2)]
    first, *rest = even
    ring = [first, *rest[len(rest) - number :], *rest[: len(rest) - number]]
    half = len(ring) // 2
    pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def rounds_of(nodes: Sequence[Sequence[int]]) -> list[Round]:
    """All rounds in which ranks of a node meet each other, and nodes each other."""
    near = max(meetings(len(ranks)) for ranks in nodes)
    return [Round(False, n) for n in range(near)] + [Round(True, n) for n in range(meetings(len(nodes)))]


def pairs_of(nodes: Sequence[Sequence[int]], meet: Round, rails: bool) -> Pairing:
    """Pairs of ranks in that round. rails: the ranks of a node have a NIC each, so all of them speak at once, each with
    its like; else only the first one does."""
    if not meet.between:
        return [pair for ranks in nodes if meet.number < meetings(len(ranks)) for pair in meeting(ranks, meet.number)]
    ends = [(nodes[a], nodes[b]) for a, b in meeting(range(len(nodes)), meet.number)]
    return [pair for a, b in ends for pair in (zip(a, b, strict=False) if rails else [(a[0], b[0])])]


def measure_pairs(meter: Meter, rank: int, nodes: Sequence[Sequence[int]], seconds: float) -> tuple[list[Sent], int]:
    """What this rank, the lower one of its pairs, has measured, and in how many rounds between the ranks of `nodes`: in
    all of them if there is time, else in some of both kinds."""
    most, size = MOST_ROUNDS[meter.device.type], PAIR_BYTES[meter.device.type]
    rounds = rounds_of(nodes)
    # The same on all ranks; those that are left out are any. Of thousands of nodes only these are made.
    chosen = Random(0).sample(rounds, min(most, len(rounds)))
    far = next((item for item in rounds if item.between), None)
    chosen = [far, *(item for item in chosen if item != far)] if far else chosen
    found, done = [], 0
    for meet, within in meter.within("messages", chosen, seconds) if chosen else ():
        pairs = pairs_of(nodes, meet, rails=meter.device.type == "cuda")
        partner = {a: b for a, b in pairs} | {b: a for a, b in pairs}
        spent_s = meter.own(ping_pong(rank, partner.get(rank), size, meter.device), min(within, LONGEST_PAIR_S)) / 2
        done += 1
        if partner.get(rank, -1) > rank:
            found.append(Sent(rank, partner[rank], spent_s, meet.between))
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
