"""The pipeline of a step: its stages' times, in closed form or as durations for a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trigrid.plan.setup import Setup
from trigrid.schedule import Durations

Kinds = tuple[tuple[str, int], ...]
"""(kind, count) of the units of a stage."""


class Chunk(NamedTuple):
    """One stage's seconds for one microbatch. forward_s and so on hold what is exposed; the parts are in both
    directions together, link_s how long their wires are busy."""

    forward_s: float
    input_s: float
    weight_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    zero_s: float
    tp_link_s: float
    cp_link_s: float
    ep_link_s: float
    zero_link_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s


class Shape(NamedTuple):
    """Which stages and which ranks are alike. kinds: the units of each kind of stage; placed: by stage, its kind;
    ranks: each kind of rank as the kinds of its stages, the first rank's first; counts: how many ranks are so;
    middle: the kinds of the stages between the first and the last."""

    kinds: tuple[Kinds, ...]
    placed: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    middle: tuple[int, ...]


def shape_of(stages: Sequence[Kinds], held_stages: Sequence[Sequence[int]], recompute: Sequence[str]) -> Shape:
    """stages: the units of each; held_stages: of each pipeline rank, its stages; recompute: by stage."""
    both = list(zip(stages, recompute, strict=True))
    number = {kind: i for i, kind in enumerate(dict.fromkeys(both))}
    kinds = tuple(units for units, _ in number)
    placed = tuple(number[kind] for kind in both)
    ranks: dict[tuple[int, ...], int] = {}
    for mine in held_stages:
        alike = tuple(placed[stage] for stage in mine)
        ranks[alike] = ranks.get(alike, 0) + 1
    return Shape(kinds, placed, tuple(ranks), tuple(ranks.values()), tuple(dict.fromkeys(placed[1:-1])))


class Slowest(NamedTuple):
    """The most that any of some stages takes for each of the three."""

    forward_s: float
    input_s: float
    weight_s: float


class Pipeline(NamedTuple):
    """All stages, and for one microbatch the seconds of all, of the rank that works longest, of the first rank, of the
    slowest stages; excess_s: what the first and the last stage take beyond the slowest of those between; exposed,
    links: of that longest rank, tp, cp, ep and zero."""

    shape: Shape
    chunks: tuple[Chunk, ...]
    sum_s: float
    longest_s: float
    first_forward_s: float
    first_backward_s: float
    slowest: Slowest
    slowest_backward_s: float
    slowest_chunk_s: float
    middle: Slowest
    excess_s: float
    exposed: tuple[float, float, float, float]
    links: tuple[float, float, float, float]

    @property
    def stages(self) -> tuple[Chunk, ...]:
        """Every stage, from the embedding's to the head's."""
        return tuple([self.chunks[kind] for kind in self.shape.placed])


def pipeline_of(shape: Shape, chunks: tuple[Chunk, ...]) -> Pipeline:
    """chunks: the seconds of each kind of stage of `shape`."""
    totals = [chunk.total_s for chunk in chunks]
    loads = [sum([totals[kind] for kind in rank]) for rank in shape.ranks]
    longest = max(range(len(loads)), key=loads.__getitem__)
    mine, first = [chunks[kind] for kind in shape.ranks[longest]], [chunks[kind] for kind in shape.ranks[0]]
    middle = _slowest([chunks[kind] for kind in shape.middle])
    ends = (chunks[shape.placed[0]], chunks[shape.placed[-1]])
    return Pipeline(
        shape=shape,
        chunks=chunks,
        sum_s=sum([load * count for load, count in zip(loads, shape.counts, strict=True)]),
        longest_s=loads[longest],
        first_forward_s=sum([c.forward_s for c in first]),
        first_backward_s=sum([c.input_s + c.weight_s for c in first]),
        slowest=_slowest(chunks),
        slowest_backward_s=max([c.input_s + c.weight_s for c in chunks]),
        slowest_chunk_s=max(totals),
        middle=middle,
        excess_s=sum([max(0.0, own - usual) for end in ends for own, usual in zip(end[:3], middle, strict=True)]),
        exposed=_summed([c[3:7] for c in mine]),
        links=_summed([c[7:11] for c in mine]),
    )


def _slowest(chunks: Sequence[Chunk]) -> Slowest:
    if not chunks:
        return Slowest(0.0, 0.0, 0.0)
    return Slowest(max([c[0] for c in chunks]), max([c[1] for c in chunks]), max([c[2] for c in chunks]))


def _summed(columns: Sequence[tuple[float, ...]]) -> tuple[float, float, float, float]:
    tp, cp, ep, zero = map(sum, zip(*columns, strict=True))
    return tp, cp, ep, zero


def durations(setup: Setup, stages: tuple[Chunk, ...], message_s: float) -> Durations:
    """What a replay of the schedule needs; a boundary between two stages of one rank is free."""
    forward = tuple(c.forward_s for c in stages)
    into, weight = tuple(c.input_s for c in stages), tuple(c.weight_s for c in stages)
    hops = tuple(0.0 if setup.holder(s) == setup.holder(s + 1) else message_s for s in range(len(stages) - 1))
    both = tuple(i + w for i, w in zip(into, weight, strict=True))
    return Durations(forward_s=forward, backward_s=both, input_s=into, weight_s=weight, p2p_s=hops)


def closed_form(setup: Setup, piped: Pipeline, message_s: float) -> float:
    """Seconds that no replay of the pipeline exceeds, and that it takes where stages are equal and messages free.

    gpipe: forwards, then backwards through stages and wires, of which the slowest sets the pace; exact always.
    1f1b: (m − 1) times the rank that works longest, or a round trip over all wires, and once through all.
    The others: equal stages as slow as the slowest are an upper bound, since no time that grows makes a step shorter;
    so are equal stages as slow as the slowest between the ends, and m times what the ends take beyond that, since the
    longest chain of sums is no longer than the longest chains of the two parts together. A message counts as part
    of the action that sends it. Equal stages are exact (`_idle_s`) but for interleaved where m is above p and no
    multiple of it, which is no slower than the next multiple.
    """
    pp, m = setup.pp, setup.microbatches
    if setup.schedule == "gpipe":
        hops = 2 * message_s * (pp - 1)
        pace = max(piped.slowest.forward_s, message_s) + max(piped.slowest_backward_s, message_s)
        return (m - 1) * pace + piped.sum_s + hops
    if setup.schedule == "1f1b" or (setup.schedule == "interleaved" and setup.virtual == 1):
        through = 2 * message_s * (pp - 1)
        return (m - 1) * (piped.longest_s + through / pp) + piped.sum_s + through
    equal = _equal_s(setup, piped.slowest, message_s)
    if not piped.shape.middle:
        return equal
    return min(equal, _equal_s(setup, piped.middle, message_s) + m * piped.excess_s)


def estimate(setup: Setup, piped: Pipeline, message_s: float) -> float:
    """About the seconds of the pipeline, mostly within 5 % of the replay: the rank that works longest, and the bubble
    of the slowest stages. Where the closed form is tight, that."""
    pp, m, v = setup.pp, setup.microbatches, setup.virtual
    most = closed_form(setup, piped, message_s)
    if setup.schedule in ("gpipe", "1f1b") or v * pp < 3:
        return most
    through = 2 * message_s * (pp - 1)
    if setup.schedule == "interleaved":
        slowest, groups = piped.slowest, -(-m // pp)
        surplus = (groups * pp - m) * (v - 1) if m > pp else 0
        uneven_s = surplus * max(slowest.forward_s, piped.slowest_backward_s)
        rounds = pp - 1 + max(0, pp - m) * (v - 1)
        hops = through * (v + 1) * (1 + groups / 4)
        return min(most, m * piped.longest_s + rounds * piped.slowest_chunk_s + uneven_s + hops)
    return min(most, m * (piped.longest_s + through / pp) + _idle_s(setup, *piped.slowest) + through)


def least_s(setup: Setup, stage: Slowest) -> float:
    """Seconds, at least, where no stage is faster than `stage` and messages may be free."""
    m, v, p = setup.microbatches, setup.virtual, setup.pp
    if setup.schedule == "interleaved" and m > p:
        # The last round, where it is not full, goes back at least as slowly as its messages.
        idle = (p - 1) * sum(stage) + -m % p * (v - 1) * (stage.input_s + stage.weight_s)
    else:
        idle = _idle_s(setup, *stage)
    return m * v * sum(stage) + idle


def _equal_s(setup: Setup, stage: Slowest, message_s: float) -> float:
    """Seconds, at most, where all stages are `stage` and each result a message."""
    forward, into, weight = stage.forward_s + message_s, stage.input_s + message_s, stage.weight_s
    return setup.microbatches * setup.virtual * (forward + into + weight) + _idle_s(setup, forward, into, weight)


def _idle_s(setup: Setup, forward: float, into: float, weight: float) -> float:
    """Seconds that a rank idles where stages are equal and messages free: the longest of the chains that any durations
    make the longest, less the rank's work. interleaved: Narayanan 2021, section 2.2; zb-h1: Qi 2023, section 3.1."""
    p, m, v = setup.pp, setup.microbatches, setup.virtual
    n, filled = p - 1, min(m, p)
    match setup.schedule:
        case "1f1b" | "gpipe":
            return n * (forward + into + weight)
        case "interleaved":
            missing = (p - m) * (v - 1) if m < p else -m % p * v
            return (n + missing) * (forward + into + weight)
        case "zb-h1":
            chains = [
                (n, p - filled, 0),
                (p - filled, n, 0),
                (n, n, 1 - filled),
            ]
        case "zbv" if m > p:
            few = max(0, 2 * p - 1 - m)
            chains = [
                (0, 1 + few, n - 1 - few),
                (0, n + few, -few),
                (0, 2 * few, 0),
                (0, 2 * n, 2 * few - 2 * n),
                (1 + few, 0, n - 1 - few),
                (few, few, 0),
                (2 * n - 1 - few, 1 + few - n, 0),
                (2 * n - 1 - few, 1 + 2 * few - n, -few),
                (2 * n - 1 - few, 1 + few, 2 * few - 2 * n),
                (2 * n - few, few - n, -1),
                (2 * n - few, 2 * few - n, max(-1 - few, few - n)),
                (2 * n - few, few, 2 * few - 2 * n - 1),
                (2 * n, -n, max(-1 - 2 * few, -n)),
                (2 * n, few - n, max(-1 - 3 * few, -n - few)),
                (2 * n, 0, -2 * n - 1),
            ]
        case "zbv":
            less = filled - 1
            chains = [
                (2 * (p - filled), 2 * n, 0),
                (2 * n - less, 2 * n - less, 0),
                (2 * n, 2 * n - 3 * less, -less),
                (2 * n, 2 * n - 2 * less, -2 * less),
            ]
        case "dualpipev" if m > p:
            few = max(0, 2 * p - 1 - m)
            chains = [
                (-1, 2 * n, 2 * few - n),
                (-1, n + few, few),
                (n, few, few),
                (n, n, 2 * few - n),
                (2 * n, 0, 2 * few - 2 * n),
                (2 * n, few - n, few - n),
            ]
        case "dualpipev":
            less = filled - 1
            chains = [
                (2 * (p - filled), 2 * n, n),
                (2 * n - less, 2 * n - less, n),
                (2 * n, 2 * (p - filled), p - filled),
            ]
        case _:
            raise AssertionError(setup.schedule)
    return _longest(chains, forward, into, weight)


def _longest(chains: Sequence[tuple[int, int, int]], forward: float, into: float, weight: float) -> float:
    return max([f * forward + i * into + w * weight for f, i, w in chains])
