"""The pipeline of a step: its stages' times, in closed form or as durations for a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trigrid.plan.setup import V_SHAPED, Setup
from trigrid.schedule import Durations


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


class Pipeline(NamedTuple):
    """All stages, and for one microbatch the seconds of all, of the rank that works longest, of the first rank, of the
    slowest stage; exposed, links: of that longest rank, tp, cp, ep and zero."""

    stages: tuple[Chunk, ...]
    sum_s: float
    longest_s: float
    first_forward_s: float
    first_backward_s: float
    slowest_forward_s: float
    slowest_backward_s: float
    slowest_chunk_s: float
    fill_s: float
    v_fill_s: float
    exposed: tuple[float, float, float, float]
    links: tuple[float, float, float, float]


def pipeline_of(stages: tuple[Chunk, ...], held_stages: Sequence[Sequence[int]]) -> Pipeline:
    """held_stages: of each pipeline rank, its stages."""
    held = [[stages[stage] for stage in mine] for mine in held_stages]
    loads = [sum(c.forward_s + c.input_s + c.weight_s for c in chunks) for chunks in held]
    every = set(stages)
    longest = max(range(len(held)), key=loads.__getitem__)
    mine = held[longest]
    return Pipeline(
        stages=stages,
        sum_s=sum(loads),
        longest_s=loads[longest],
        first_forward_s=sum(c.forward_s for c in held[0]),
        first_backward_s=sum(c.input_s + c.weight_s for c in held[0]),
        slowest_forward_s=max(c.forward_s for c in every),
        slowest_backward_s=max(c.input_s + c.weight_s for c in every),
        slowest_chunk_s=max(c.total_s for c in every),
        fill_s=max(c.forward_s + c.input_s - c.weight_s for c in every),
        v_fill_s=max(c.forward_s + c.input_s - 2 * c.weight_s for c in every),
        exposed=(
            sum(c.tp_s for c in mine),
            sum(c.cp_s for c in mine),
            sum(c.ep_s for c in mine),
            sum(c.zero_s for c in mine),
        ),
        links=(
            sum(c.tp_link_s for c in mine),
            sum(c.cp_link_s for c in mine),
            sum(c.ep_link_s for c in mine),
            sum(c.zero_link_s for c in mine),
        ),
    )


def durations(setup: Setup, stages: tuple[Chunk, ...], message_s: float) -> Durations:
    """What a replay of the schedule needs; a boundary between two stages of one rank is free."""
    forward = tuple(c.forward_s for c in stages)
    into, weight = tuple(c.input_s for c in stages), tuple(c.weight_s for c in stages)
    hops = tuple(0.0 if setup.holder(s) == setup.holder(s + 1) else message_s for s in range(len(stages) - 1))
    both = tuple(i + w for i, w in zip(into, weight, strict=True))
    return Durations(forward_s=forward, backward_s=both, input_s=into, weight_s=weight, p2p_s=hops)


def closed_form(setup: Setup, piped: Pipeline, message_s: float) -> float:
    """Seconds of the pipeline, an upper bound that is exact for equal stages and free messages.

    gpipe, 1f1b: (m − 1) times the slowest stage and once through all. interleaved: the same by chunks (Narayanan 2021,
    section 2.2). zb-h1: the fill costs (p − 1)(F + I − W) (Qi 2023, section 3.1); V shapes at most that by chunks.
    """
    pp, m, v = setup.pp, setup.microbatches, setup.virtual
    through = 2 * message_s * (pp - 1)
    if setup.schedule == "gpipe":
        return (m - 1) * (piped.slowest_forward_s + piped.slowest_backward_s) + piped.sum_s + through
    if setup.schedule == "1f1b" or (setup.schedule == "interleaved" and v == 1):
        return (m - 1) * (piped.longest_s + through / pp) + piped.sum_s + through
    if setup.schedule == "interleaved":
        groups = -(-m // pp)
        return groups * pp * piped.longest_s + (pp - 1) * piped.slowest_chunk_s + through * (v + 1) * (1 + groups / 4)
    fill = piped.v_fill_s if setup.schedule in V_SHAPED else piped.fill_s
    return m * (piped.longest_s + through / pp) + (pp - 1) * max(0.0, fill) + through
