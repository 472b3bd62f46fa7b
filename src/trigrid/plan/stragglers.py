"""What slow ranks, slow links, jitter and failures cost a step, for ranks by the ten thousand.

Ranks that meet in a collective within each microbatch move in *lockstep*: the TP and CP ranks of a stage, EP groups,
and under ZeRO policies that gather or reduce for every microbatch, all that share shards. A lockstep is as fast as its
slowest GPU, so a pipeline is played as one rank per stage. Pipelines are independent until their gradients are
reduced; there every data-parallel group waits for its slowest member, and the step for the slowest pipeline. Pipelines
without a slow rank or link are alike: only distinct ones are played.

Jitter of share σ: in each repetition the compute times of every GPU are multiplied with exp(σ·z), z normal, drawn once
for all of the step. Of a lockstep of n GPUs only the largest z counts, which is drawn at once as Φ⁻¹(u^(1/n)), from the
quantiles (k + ½) ÷ 65,536. Messages and what lies beyond the pipeline have no jitter.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, exp, expm1, inf, lcm, log
from random import Random
from statistics import NormalDist, fmean
from typing import NamedTuple

from trigrid.grid import Coord, grid_of
from trigrid.plan.setup import Setup
from trigrid.plan.simulate import Simulation
from trigrid.schedule import Action, Order, Timeline, sends_to
from trigrid.schedule.lanes import fixed, play_lanes

QUANTILES = 2**16
MOST_PLAYED = 100_000_000
"""Actions played in one set of repetitions, at most; beyond that pipelines are drawn from as many as that allows."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """slow_ranks: factor on the compute times of single GPUs; slow_links: factor on messages from one pipeline rank to
    another, in the first pipeline; jitter: σ above; stops: GPUs that stop, each so many seconds after the pipelines'
    begin."""

    slow_ranks: Mapping[int, float]
    slow_links: Mapping[tuple[int, int], float]
    jitter: float = 0.0
    seed: int = 0
    repetitions: int = 1
    stops: Mapping[int, float] = field(default_factory=dict)


class Straggler(NamedTuple):
    """What one slow rank or link costs by itself. lockstep: GPUs that wait for it within each microbatch; pipeline_s:
    what its pipeline takes longer; group_s: by pipeline rank, what the other members of the data-parallel group wait
    for it; gpu_s: GPU-seconds that all together lose."""

    name: str
    at: Coord
    lockstep: int
    pipeline_s: float
    group_s: tuple[float, ...]
    gpu_s: float


class Stopped(NamedTuple):
    """A pipeline rank after a failure: the last action it finishes and when, and the one that never comes to an end."""

    last: Action | None
    since_s: float
    waits_at: Action | None


class Failure(NamedTuple):
    """A pipeline in which GPUs stop. stops: (rank, time_s) of each; ranks: what each pipeline rank comes to."""

    pipeline: int
    stops: tuple[tuple[int, float], ...]
    ranks: tuple[Stopped, ...]


@dataclass(frozen=True)
class Statistics:
    """Seconds of a step over all repetitions. played: pipelines played; drawn: whether the slowest pipeline of each
    repetition was drawn from these, since all of them were too many."""

    mean_s: float
    p50_s: float
    p95_s: float
    max_s: float
    played: int
    drawn: bool


@dataclass(frozen=True)
class Replicas:
    """The pipelines of a setup. lockstep: GPUs of each stage that move together."""

    setup: Setup

    @cached_property
    def lockstep(self) -> int:
        setup = self.setup
        if setup.gather_per_use or setup.reduce_per_microbatch:
            return setup.tp * setup.shards
        return setup.tp * lcm(setup.cp, setup.ep)

    @property
    def pipelines(self) -> int:
        return self.setup.world // self.setup.pp // self.lockstep

    def pipeline_of(self, at: Coord) -> int:
        """The pipeline that the rank at `at` is in."""
        return (at.dp * self.setup.cp + at.cp) // (self.lockstep // self.setup.tp)


def slowed(simulation: Simulation, factors: Mapping[int, float], links: Mapping[tuple[int, int], float]) -> Timeline:
    """The pipeline where some pipeline ranks and links (from, to) take longer."""
    order = simulation.timeline.order
    seconds = [
        took * factors.get(rank, 1.0)
        for took, rank in zip(order.seconds(simulation.durations), order.ranks, strict=True)
    ]
    delays = order.delays(simulation.durations)
    if links:
        delays = [delay * links.get(pair, 1.0) for delay, pair in zip(delays, _pairs(order), strict=True)]
    return order.play(seconds, delays)


def stragglers(simulation: Simulation, faults: Faults) -> list[Straggler]:
    """What each slow rank and each slow link costs, all others being as fast as planned."""
    setup, grid = simulation.stages.setup, grid_of(simulation.job)
    replicas = Replicas(setup)
    cases = [
        (f"rank {rank}", grid.coord(rank), {grid.coord(rank).pp: factor}, dict[tuple[int, int], float]())
        for rank, factor in faults.slow_ranks.items()
    ]
    cases += [(f"link {a}-{b}", Coord(0, a, 0, 0), {}, {(a, b): f}) for (a, b), f in faults.slow_links.items()]
    usual, found = _last_ends(simulation.timeline), []
    for name, at, factors, links in cases:
        timeline = slowed(simulation, factors, links)
        longer = timeline.step_s - simulation.timeline.step_s
        later = tuple(max(0.0, a - b) for a, b in zip(_last_ends(timeline), usual, strict=True))
        found.append(Straggler(name, at, replicas.lockstep, longer, later, longer * setup.world))
    return found


def together_s(simulation: Simulation, faults: Faults) -> float:
    """Seconds of the step with all slow ranks and links at once, and no jitter."""
    return statistics(simulation, replace(faults, jitter=0.0, repetitions=1)).max_s


def failures(simulation: Simulation, faults: Faults) -> list[Failure]:
    """The pipelines in which GPUs stop, each by itself: they wait for one another only after their last action."""
    replicas, grid = Replicas(simulation.stages.setup), grid_of(simulation.job)
    stops: dict[int, dict[int, float]] = {}
    for rank, time_s in faults.stops.items():
        stops.setdefault(replicas.pipeline_of(grid.coord(rank)), {})[rank] = time_s
    found = []
    for pipeline, mine in sorted(stops.items()):
        first: dict[int, float] = {}
        for rank, time_s in mine.items():
            stage = grid.coord(rank).pp
            first[stage] = min(time_s, first.get(stage, inf))
        found.append(Failure(pipeline, tuple(mine.items()), tuple(after_stops(simulation, first))))
    return found


def after_stops(simulation: Simulation, stops: Mapping[int, float]) -> list[Stopped]:
    """What each rank of a pipeline comes to where some stop. stops: by pipeline rank, when."""
    order, usual = simulation.timeline.order, simulation.timeline
    ranks = len(order.schedule.ranks)
    last: list[Action | None] = [None] * ranks
    since, waits_at = [0.0] * ranks, [None] * ranks  # type: list[float], list[Action | None]
    lost = [False] * len(order.ranks)
    for i, (rank, needed) in enumerate(zip(order.ranks, order.awaits, strict=True)):
        dies = usual.ends_s[i] > stops.get(rank, inf)
        # Up to here nothing has waited for what is lost, so times are as usual.
        if dies or waits_at[rank] is not None or (needed >= 0 and lost[needed]):
            lost[i] = True
            waits_at[rank] = waits_at[rank] or order.actions[i]
        else:
            last[rank], since[rank] = order.actions[i], usual.ends_s[i]
    return [Stopped(*row) for row in zip(last, since, waits_at, strict=True)]


def statistics(simulation: Simulation, faults: Faults) -> Statistics:
    """Steps with all faults at once, over the repetitions."""
    replicas, order = Replicas(simulation.stages.setup), simulation.timeline.order
    grid = grid_of(simulation.job)
    slow: dict[int, dict[int, float]] = {}
    for rank, factor in faults.slow_ranks.items():
        at = grid.coord(rank)
        mine = slow.setdefault(replicas.pipeline_of(at), {})
        mine[at.pp] = max(factor, mine.get(at.pp, 1.0))
    if faults.slow_links:
        slow.setdefault(0, {})
    alike, repetitions = replicas.pipelines - len(slow), faults.repetitions
    random = Random(faults.seed)
    clean = min(alike * repetitions, max(repetitions, MOST_PLAYED // len(order.ranks)))
    drawn = clean < alike * repetitions
    steps = [0.0] * repetitions
    if clean:
        ends = _played(simulation, faults, random, replicas.lockstep, clean, {}, {})
        if drawn:
            ends.sort()
            # The slowest of n is above a share u of all with the chance u^n.
            places = [ceil(clean * (1.0 - random.random()) ** (1 / alike)) - 1 for _ in range(repetitions)]
            steps = [ends[max(0, place)] for place in places]
        else:
            steps = [max(ends[i : i + alike]) for i in range(0, clean, alike)]
    for pipeline, factors in slow.items():
        links = faults.slow_links if pipeline == 0 else {}
        ends = _played(simulation, faults, random, replicas.lockstep, repetitions, factors, links)
        steps = list(map(max, steps, ends))
    steps = sorted(step + simulation.beyond_s for step in steps)
    played = clean + len(slow) * repetitions
    return Statistics(fmean(steps), _rank(steps, 0.5), _rank(steps, 0.95), steps[-1], played, drawn)


def _played(
    simulation: Simulation,
    faults: Faults,
    random: Random,
    lockstep: int,
    count: int,
    slow: Mapping[int, float],
    links: Mapping[tuple[int, int], float],
) -> list[float]:
    """The ends of `count` pipelines. slow: by pipeline rank, the factor of its slowest GPU."""
    order = simulation.timeline.order
    table, others, alone = (_quantiles(faults.jitter, n) for n in (lockstep, lockstep - 1, 1))
    factors = []
    for rank in range(len(order.schedule.ranks)):
        if rank in slow:
            own = (round(slow[rank] * z) for z in _drawn(alone, random, count))
            factors.append(array("Q", map(max, own, _drawn(others, random, count))))
        else:
            factors.append(_drawn(table, random, count))
    pairs = _pairs(order)
    link_factors = {
        link: array("Q", [fixed(links[pair])]) * count
        for link, pair in zip(order.links, pairs, strict=True)
        if pair in links
    }
    durations = simulation.durations
    return play_lanes(order, order.seconds(durations), order.delays(durations), factors, link_factors)


def _quantiles(jitter: float, gpus: int) -> Sequence[int]:
    """The factor of the slowest of `gpus` GPUs at equally likely quantiles, as lanes hold it."""
    if not gpus:
        return (0,) * QUANTILES
    if not jitter:
        return (fixed(1.0),) * QUANTILES
    # 1 − u^(1/n), without the rounding of numbers close to 1.
    tails = (-expm1(log((k + 0.5) / QUANTILES) / gpus) for k in range(QUANTILES))
    inverse = NormalDist().inv_cdf
    return [fixed(exp(-jitter * inverse(tail))) for tail in tails]


def _drawn(table: Sequence[int], random: Random, count: int) -> array[int]:
    places = array("H")
    places.frombytes(random.randbytes(places.itemsize * count))
    return array("Q", map(table.__getitem__, places))


def _pairs(order: Order) -> list[tuple[int, int]]:
    """The ranks that the message of each entry goes from and to; to −1 where there is none."""
    targets = [sends_to(order.schedule, action) for action in order.actions]
    return [(rank, -1 if to is None else to) for rank, to in zip(order.ranks, targets, strict=True)]


def _last_ends(timeline: Timeline) -> list[float]:
    """When each rank is through, so that its gradients can be reduced."""
    ends = [0.0] * len(timeline.busy_s)
    for rank, end_s in zip(timeline.order.ranks, timeline.ends_s, strict=True):
        ends[rank] = end_s
    return ends


def _rank(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
