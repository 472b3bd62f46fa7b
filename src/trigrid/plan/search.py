"""The best layout of a job: every legal one bounded, those worth it priced, the best of them replayed.

Branch and bound, nearest bound first (Land 1960): degrees by what evenly spread work would take, then each layout by
bounds.py. What is left out cannot be SLACK times as fast as the best that is known, or cannot fit; both follow from the
bounds, so the winner is that of a replay of everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from trigrid.blueprint.claims import claims
from trigrid.blueprint.decoder import block_kinds
from trigrid.errors import Problem, Refused
from trigrid.plan.bounds import Bounds
from trigrid.plan.found import Candidate, Counts, Found
from trigrid.plan.memory import fullest_ranks
from trigrid.plan.plan import number_format, setup_of, step_for
from trigrid.plan.setup import SPLIT_BACKWARD, V_SHAPED, Setup
from trigrid.plan.software import Software, engine_software
from trigrid.plan.space import KNOBS, Degrees, Piping, Sharding, Space
from trigrid.plan.step import Step
from trigrid.spec.job import Job

SLACK = 1.03
"""Layouts are priced, and told in the front, that take up to this many times as long as the best."""
REPLAYED = 50
MOST_PLAYED = 500_000
ACTIONS = 300_000
"""Of schedules that are replayed at most while pricing, and at the end beside the first FEWEST_REPLAYED layouts."""
ENOUGH = 16
"""Rounds of p microbatches from which on a schedule is replayed by fewer (schedule/steady.py)."""
FEWEST_REPLAYED = 5
MOST_PRICED = 40_000
"""Where so many bounds are so near to each other, the search ends without a proof."""
CERTAIN = ("1f1b", "gpipe")
"""Schedules whose estimate is an upper bound."""
UNEVEN = 1.2
"""The closed form of memory takes the mean of a rank's chunks, and of halved backwards the most that is under way
beside the fullest action: where it may be too large by this, it is looked at action by action."""


class Work(NamedTuple):
    """What a rank computes, however it is ordered and its state sharded."""

    grid: Degrees
    micro_batch: int
    recompute: str | tuple[str, ...]


class Searcher:
    """A search under way."""

    def __init__(self, space: Space, software: Software, hbm_bytes: float | None = None):
        job = space.job
        self.space, self.software = space, software
        self.step: Step = step_for(job.model, job.cluster, software, number_format(job))
        self.ceiling = self.step.machine.gpu.hbm_bytes if hbm_bytes is None else hbm_bytes
        self.priced = self.played = 0
        # Seconds that a layout takes for certain.
        self.best = float("inf")
        self.bounds = Bounds(self.step, self._some(space.grids[0]))
        self._least: dict[tuple[Degrees, int, bool], int] = {}
        self._fullest: dict[tuple[object, ...], tuple[tuple[int, ...], float]] = {}
        self._replays: dict[Setup, Candidate] = {}
        self.found: list[Candidate] = []
        # By their bound these may be the best, by their estimate not: they are looked at when the best are replayed.
        self.doubtful: list[tuple[float, Setup]] = []

    def run(self, replays: int = REPLAYED, slack: float = SLACK) -> Found:
        """Search; the space must not be empty."""
        self.found += self._near(slack)
        ranked, proved = self._rank(replays)
        counts = Counts(self.space.count(), self.priced, len(self.found), len(self._replays))
        tightest = None if ranked else self.tightest()
        front = self._front(ranked[0].step_s) if ranked else ()
        return Found(self.space, self.software, ranked, front, counts, proved, tightest)

    # Bounds and prices

    def _near(self, slack: float) -> Iterator[Candidate]:
        """Layouts that fit, or nearly so, and are at most `slack` times as slow as the best."""
        space = self.space
        heap: list[tuple[float, int, Degrees | Work | Setup]] = []
        order = count()
        for grid in space.grids:
            heappush(heap, (min(self._ideal_s(work) for work in self._works(grid)), next(order), grid))
        while heap and heap[0][0] <= slack * self.best and self.priced < MOST_PRICED:
            bound, _, item = heappop(heap)
            if isinstance(item, Degrees):
                for work in self._works(item):
                    heappush(heap, (self._ideal_s(work), next(order), work))
                continue
            if isinstance(item, Work):
                for setup in self._pipelines(item):
                    least = self.bounds.step_s(setup)
                    if least <= slack * self.best:
                        heappush(heap, (least, next(order), setup))
                continue
            for setup in self._shardings(item):
                least = max(bound, self.bounds.sharded_s(setup))
                if least > slack * self.best:
                    continue
                self.priced += 1
                least += self.bounds.finish_s(setup)
                seconds = max(least, self.step.estimate_s(setup))
                if seconds > slack * self.best:
                    if least < self.best:
                        self.doubtful.append((seconds, setup))
                    continue
                peak = self._peak(setup)
                if peak is None:
                    continue
                if seconds < self.best:
                    # What rules out others must be certain: an upper bound, or a replay.
                    if setup.schedule in CERTAIN and peak * self._full_ranks(setup)[1] <= self.ceiling:
                        self.best = seconds
                    elif self.played < MOST_PLAYED:
                        self.best = min(self.best, self.replayed(setup).step_s)
                yield Candidate(seconds, peak, setup)

    def _peak(self, setup: Setup) -> float | None:
        """Bytes of the fullest rank in closed form, None where it cannot fit."""
        ranks, uneven = self._full_ranks(setup)
        memory, limit, peak = self.step.memory, self.ceiling * min(uneven, UNEVEN), 0.0
        for rank in ranks:
            peak = max(peak, memory.device_bytes(setup, memory.use(setup, rank)))
            if peak > limit:
                return None
        return peak

    def _whole_peak(self, setup: Setup, exact: bool) -> float:
        """Bytes of the fullest rank, chunk by chunk where `exact`."""
        memory = self.step.memory
        ranks, _ = self._full_ranks(setup)
        return max(memory.device_bytes(setup, memory.use(setup, rank, exact=exact)) for rank in ranks)

    def _full_ranks(self, setup: Setup) -> tuple[tuple[int, ...], float]:
        """The ranks that may be the fullest, and the largest chunk of a rank over the mean of its chunks, by which the
        closed form may be wrong."""
        words = setup.recompute if not isinstance(setup.recompute, str) else ()
        key = (setup.pp, setup.virtual, setup.schedule in V_SHAPED, setup.schedule in SPLIT_BACKWARD, words)
        found = self._fullest.get(key)
        if found is None:
            held = self.step.memory.held(setup)
            uneven = max(max(map(_blocks, mine.chunks)) * setup.virtual / max(1, mine.layers) for mine in held)
            if len({kind for mine in held for kind in mine.blocks}) > 1 or setup.schedule in SPLIT_BACKWARD:
                uneven = max(uneven, UNEVEN)
            found = self._fullest[key] = (fullest_ranks(held, setup), uneven)
        return found

    def replayed(self, setup: Setup) -> Candidate:
        """`setup` with the schedule replayed and memory counted chunk by chunk; endless where it does not fit."""
        found = self._replays.get(setup)
        if found is None:
            self.played += 2 * setup.pp * setup.virtual * min(setup.microbatches, ENOUGH * setup.pp)
            peak = self._whole_peak(setup, exact=True)
            seconds = self.step.time(setup, play=True).step_s if peak <= self.ceiling else float("inf")
            found = self._replays[setup] = Candidate(seconds, peak, setup)
        return found

    def _some(self, grid: Degrees) -> Setup:
        space = self.space
        return space.setup(grid, Piping("1f1b", 1), Sharding(1, 1, False, False), 1, space.recomputes[-1])

    def _works(self, grid: Degrees) -> Iterator[Work]:
        space = self.space
        return (Work(grid, size, kind) for size in space.micro_batches(grid.dp) for kind in space.recomputes)

    def _ideal_s(self, work: Work) -> float:
        grid, micro_batch, recompute = work
        share = self.space.job.batch.global_batch // grid.dp
        return self.bounds.ideal_s(grid, micro_batch, share // micro_batch, recompute)

    def _pipelines(self, work: Work) -> Iterator[Setup]:
        """All layouts of some work but for sharding, those left out that cannot fit however they are sharded."""
        grid, micro_batch, recompute = work
        some = self.space.setup(grid, Piping("1f1b", 1), Sharding(1, 1, False, False), micro_batch, recompute)
        for piping in self.space.pipings(grid.pp):
            setup = some._replace(schedule=piping.schedule, virtual=piping.virtual)
            if self._fits(setup, self._least_state(grid, piping)):
                yield setup

    def _least_state(self, grid: Degrees, piping: Piping) -> int:
        """Bytes of the first rank's state, sharded in the way that leaves least."""
        key = (grid, piping.virtual, piping.schedule in V_SHAPED)
        found = self._least.get(key)
        if found is None:
            ways = self.space.shardings(grid)
            setups = [self.space.setup(grid, piping, way, 1, "none") for way in ways]
            found = self._least[key] = min(map(self.bounds.state_bytes, setups), default=0)
        return found

    def _fits(self, setup: Setup, state: int) -> bool:
        """Whether `setup` may fit with so much state on its first rank."""
        bounds = self.bounds
        return bounds.device_bytes(setup, state, bounds.activation_bytes(setup)) <= self.ceiling

    def _shardings(self, setup: Setup) -> Iterator[Setup]:
        grid = Degrees(setup.tp, setup.cp, setup.pp, setup.dp, setup.ep)
        bounds, kept = self.bounds, self.bounds.activation_bytes(setup)
        for copies, zero, gather, reduce in self.space.shardings(grid):
            made = setup._replace(dp_replicate=copies, zero=zero, gather_per_use=gather, reduce_per_microbatch=reduce)
            if bounds.device_bytes(made, bounds.state_bytes(made), kept) <= self.ceiling:
                yield made

    # The best of them

    def _rank(self, replays: int) -> tuple[tuple[Candidate, ...], bool]:
        """Replayed layouts that fit, the fastest first, and whether no other can be faster."""
        best, proved, before = float("inf"), self.priced < MOST_PRICED, self.played
        waiting = sorted([*((c.step_s, c.setup) for c in self.found), *self.doubtful])
        known = {c.setup for c in self.found}
        for number, (_, setup) in enumerate(waiting):
            may_win = self._least_s(setup) < best
            if not may_win and number >= replays:
                continue
            if number >= FEWEST_REPLAYED and (self.played - before >= ACTIONS or number >= 2 * replays):
                proved = proved and not may_win
                continue
            if setup not in known and self._peak(setup) is None:
                continue
            best = min(best, self.replayed(setup).step_s)
        return tuple(sorted(c for c in self._replays.values() if c.bytes <= self.ceiling)), proved

    def _least_s(self, setup: Setup) -> float:
        bounds = self.bounds
        return max(bounds.step_s(setup), bounds.sharded_s(setup)) + bounds.finish_s(setup)

    def _front(self, best_s: float) -> tuple[Candidate, ...]:
        """Each layout for which none is both as fast and as small; estimates only where nothing was replayed, and none
        below the best."""
        known = {c.setup: c for c in self.found} | self._replays
        front: list[Candidate] = []
        for candidate in sorted(c for c in known.values() if c.bytes <= self.ceiling):
            if candidate.step_s < best_s:
                continue
            if not front or candidate.bytes < front[-1].bytes:
                front.append(candidate)
        return tuple(front)

    def tightest(self) -> Candidate:
        """The layout that needs least memory of all."""
        space, bounds = self.space, self.bounds
        best: tuple[float, Setup] | None = None
        for grid in space.grids:
            micro_batch = space.micro_batches(grid.dp)[0]
            for piping in space.pipings(grid.pp):
                for sharding in space.shardings(grid):
                    setup = space.setup(grid, piping, sharding, micro_batch, space.recomputes[0])
                    state, kept = bounds.state_bytes(setup), bounds.activation_bytes(setup)
                    if best is None or bounds.device_bytes(setup, state, kept) < best[0]:
                        peak = self._whole_peak(setup, exact=False)
                        best = min(best or (peak, setup), (peak, setup))
        assert best is not None, "an empty space"
        setup = best[1]
        return Candidate(self.step.time(setup, play=True).step_s, self._whole_peak(setup, exact=True), setup)


def _blocks(chunk: tuple[tuple[str, int], ...]) -> int:
    return sum(count for _, count in chunk)


def selective_drops(job: Job, software: Software) -> bool:
    """Whether selective recomputation drops anything: with fused attention there may be nothing that is cheap."""
    spec, kernels = job.model, software.kernels
    return any(saved.dropped for kind, _ in block_kinds(spec) for saved in claims(spec, kind, kernels).saved)


def space_of(job: Job, software: Software, open: frozenset[str], gpus: int) -> Space:
    """Every legal layout of `job` on at most `gpus` GPUs where the knobs `open` are free."""
    return Space(job, open, gpus, setup_of(job, software), selective=selective_drops(job, software))


def search_layouts(
    job: Job,
    software: Software | None = None,
    *,
    open: frozenset[str] = frozenset(KNOBS),
    gpus: int | None = None,
    hbm_bytes: float | None = None,
) -> Found | None:
    """The best layouts of `job` on at most `gpus` GPUs (left out: those that it has) where the knobs `open` are free.

    hbm_bytes: what a GPU may hold, in place of the catalogue's. None where no layout goes with GPUs and batch. Raises
    Refused where knobs are free and the schedule is that of a file, which is for one layout.
    """
    if open and (file := job.parallel.schedule_file):
        reason = f"is for one layout and batch, and {', '.join(sorted(open))} would be searched: give them all"
        raise Refused([Problem("parallel.schedule_file", file, reason)])
    software = software or engine_software(job)
    space = space_of(job, software, open, gpus or job.parallel.world)
    return Searcher(space, software, hbm_bytes).run() if space.grids else None
