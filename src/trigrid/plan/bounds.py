"""What no replay can beat: lower bounds on the seconds and the bytes of a layout, from a few numbers.

A search asks for them before it prices: a layout whose bound is worse than what is known already needs no price.

Time: every pipeline rank works m times its own stages; before its first forward the stages before it are passed once
forward, and after its last backward once back (schedules that split the backward may end with weights: there only the
forward counts). And one microbatch goes through all stages and back. Collectives of each use of a weight, reductions
and the optimizer only add to that. Memory: the state of the first rank, and what its schedule keeps in flight before
its first backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from math import log2
from operator import mul
from typing import NamedTuple

from trigrid.plan.pipeline import Slowest, least_s
from trigrid.plan.setup import SPLIT_BACKWARD, V_SHAPED, Setup
from trigrid.plan.space import Degrees
from trigrid.plan.step import Step

Counts = tuple[int, ...]
"""Blocks of each kind, in the order of the model."""


class Rank(NamedTuple):
    """A pipeline rank: its blocks, those of the stages before its first one, and whether it holds the two ends."""

    blocks: Counts
    before: Counts
    first: bool
    last: bool


class Places(NamedTuple):
    """The ranks that may be the slowest: the first with most blocks, and the last; the chunks of the first rank; the
    last stage; and the fewest blocks of each kind that any stage has."""

    ranks: tuple[Rank, ...]
    first: tuple[Counts, ...]
    last: Counts
    least: Counts


class Units(NamedTuple):
    """Seconds for one microbatch. forward, into, whole: of a block of each kind, `into` the gradient of its input and
    whole all of it; embedding, head: (forward, whole, into). forward_s: all units forward, through_s: and back to the
    input, work_s: with the weights' gradients, too.
    """

    forward: tuple[float, ...]
    into: tuple[float, ...]
    whole: tuple[float, ...]
    embedding: tuple[float, float, float]
    head: tuple[float, float, float]
    forward_s: float
    through_s: float
    work_s: float


class Bounds:
    """Bounds for one model on one machine; remembers what layouts share."""

    def __init__(self, step: Step, setup: Setup):
        self.step, self._base = step, setup
        memory, layers = step.memory, step.spec.layers
        runs = memory.kinds(0, layers)
        self._runs = tuple(count for _, count in runs)
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in runs))
        self._first = tuple(next(i for i, (kind, _) in enumerate(runs) if kind == one) for one in self.kinds)
        # Without the pipeline's stride the other axes are as near as they can be.
        self._order = ("pp", *(axis for axis in setup.order if axis != "pp"))
        self._units: dict[tuple[object, ...], Units] = {}
        self._placed: dict[tuple[int, int, bool], Places] = {}
        self._kept: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._held: dict[tuple[str, int, int, int], Counts] = {}
        self._runtime: dict[tuple[object, ...], float] = {}
        self._state: dict[tuple[object, ...], int] = {}
        values = step.machine.values
        self._factors: dict[int, float] = {}
        self._jitter = values["jitter.share"] / 10
        self._fixed = values[f"step.{step.software.generation}"]

    def units(self, tp: int, cp: int, ep: int, micro_batch: int, recompute: str | tuple[str, ...]) -> Units:
        if not isinstance(recompute, str):
            recompute = "none"
        key = (tp, cp, ep, micro_batch, recompute)
        found = self._units.get(key)
        if found is None:
            # A stage for each run of blocks alike.
            ends = (0, *self._runs, 0)
            setup = self._base._replace(
                tp=tp,
                cp=cp,
                pp=len(ends),
                dp=1,
                ep=ep,
                dp_replicate=1,
                zero=1,
                gather_per_use=False,
                reduce_per_microbatch=False,
                schedule="1f1b",
                virtual=1,
                micro_batch=micro_batch,
                recompute=recompute,
                stage_layers=ends,
                order=self._order,
            )
            first, *blocks, last = self.step.pipeline(setup).stages
            chunks = (first, *blocks, last)
            each = [(blocks[i], self._runs[i]) for i in self._first]
            found = self._units[key] = Units(
                forward=tuple(c.forward_s / n for c, n in each),
                into=tuple(c.input_s / n for c, n in each),
                whole=tuple(c.total_s / n for c, n in each),
                embedding=(first.forward_s, first.total_s, first.input_s),
                head=(last.forward_s, last.total_s, last.input_s),
                forward_s=sum(c.forward_s for c in chunks),
                through_s=sum(c.forward_s + c.input_s for c in chunks),
                work_s=sum(c.total_s for c in chunks),
            )
        return found

    def _places(self, setup: Setup) -> Places:
        key = (setup.pp, setup.virtual, setup.schedule in V_SHAPED)
        found = self._placed.get(key)
        if found is None:
            held, memory = self.step.memory.held(setup), self.step.memory
            split = setup.layers_of(self.step.spec.layers)
            before = list(accumulate(split, initial=0))
            stages = [self._vector(memory.kinds(first, n)) for first, n in zip(before, split, strict=False)]
            chosen = {max(range(setup.pp), key=lambda rank: held[rank].layers), setup.pp - 1}
            ranks = tuple(
                Rank(
                    self._vector(held[rank].parts),
                    self._vector(memory.kinds(0, before[held[rank].stages[0]])),
                    held[rank].first,
                    held[rank].last,
                )
                for rank in chosen
            )
            first = tuple(stages[stage] for stage in held[0].stages)
            found = self._placed[key] = Places(ranks, first, stages[-1], tuple(map(min, zip(*stages, strict=True))))
        return found

    def _vector(self, parts: Iterable[tuple[str, int]]) -> Counts:
        counts: Counter[str] = Counter()
        for kind, count in parts:
            counts[kind] += count
        return tuple(counts[kind] for kind in self.kinds)

    def ideal_s(self, grid: Degrees, micro_batch: int, microbatches: int, recompute: str | tuple[str, ...]) -> float:
        """Seconds if the work were spread evenly and nobody waited: a bound for all schedules."""
        units = self.units(grid.tp, grid.cp, grid.ep, micro_batch, recompute)
        return self._with_jitter(grid.dp * grid.cp, microbatches * units.work_s / grid.pp)

    def step_s(self, setup: Setup) -> float:
        """Seconds that no replay of `setup` beats."""
        units = self.units(setup.tp, setup.cp, setup.ep, setup.micro_batch, setup.recompute)
        m, split = setup.microbatches, setup.schedule in SPLIT_BACKWARD
        passed = units.forward if split else units.whole
        best = units.through_s
        for blocks, before, first, last in self._places(setup).ranks:
            load = sum(map(mul, blocks, units.whole))
            fill = sum(map(mul, before, passed))
            if first:
                load += units.embedding[1]
            else:
                fill += units.embedding[0 if split else 1]
            if last:
                load += units.head[1]
            best = max(best, m * load + fill)
            if last and setup.schedule == "interleaved" and setup.virtual > 1:
                best = max(best, self._last_round_s(setup, units, blocks, before))
        if split or setup.schedule == "interleaved":
            best = max(best, least_s(setup, self._fastest(setup, units)))
        if split:
            best = max(best, self._first_rank_s(setup, units))
        return self._with_jitter(setup.dp * setup.cp, best)

    def _last_round_s(self, setup: Setup, units: Units, blocks: Counts, before: Counts) -> float:
        """Before the last round of microbatches goes back through all stages, the last rank has done the forwards and
        all backwards of the rounds before; that round may be smaller than the pipeline is deep."""
        pp, m, v = setup.pp, setup.microbatches, setup.virtual
        last = (m - 1) % pp + 1
        ahead = max(0, last * v - (v - 1) * pp - 1)
        fill: float = sum(map(mul, before, units.forward)) + units.embedding[0]
        forward = sum(map(mul, blocks, units.forward)) + units.head[0]
        backward = sum(map(mul, blocks, units.whole)) + units.head[1] - forward
        chunk = sum(map(mul, self._places(setup).last, units.forward)) + units.head[0]
        back_s: float = (m - last) * backward + units.work_s - units.forward_s
        return float(fill + m * forward - ahead * chunk + back_s)

    def _fastest(self, setup: Setup, units: Units) -> Slowest:
        """The least that any stage takes for each of the three; embedding and head only make a stage slower."""
        blocks = self._places(setup).least
        forward, into = sum(map(mul, blocks, units.forward)), sum(map(mul, blocks, units.into))
        return Slowest(forward, into, max(0.0, sum(map(mul, blocks, units.whole)) - forward - into))

    def _first_rank_s(self, setup: Setup, units: Units) -> float:
        """The first rank's work, and its wait for the first microbatch to come back, less the forwards meanwhile."""
        pp, m, v_shaped = setup.pp, setup.microbatches, setup.schedule in V_SHAPED
        chunks = self._places(setup).first
        own_s: float = sum(map(mul, chunks[0], units.forward)) + units.embedding[0]
        load: float = sum(sum(map(mul, chunk, units.whole)) for chunk in chunks) + units.embedding[1]
        forwards = min(m, 2 * pp - 1 if v_shaped else pp)
        if v_shaped:
            load += units.head[1]
            back_s = units.forward_s - own_s - sum(map(mul, chunks[-1], units.forward)) - units.head[0]
        else:
            back_s = units.through_s - own_s - units.embedding[2] - sum(map(mul, chunks[0], units.into))
        waits_s: float = max(0.0, back_s - (forwards - 1) * own_s)
        return m * load + waits_s

    def sharded_s(self, setup: Setup) -> float:
        """Seconds that the first rank works and moves weights and gradients of each use: what `step_s` leaves out."""
        gather, reduce, _ = self.step.transfers(setup)
        gathered = 2 * gather if setup.gather_per_use else 0.0
        reduced = reduce if setup.reduce_per_microbatch else 0.0
        if not gathered + reduced:
            return 0.0
        software = self.step.software
        units = self.units(setup.tp, setup.cp, setup.ep, setup.micro_batch, setup.recompute)
        load = sum(sum(map(mul, chunk, units.whole)) for chunk in self._places(setup).first) + units.embedding[1]
        if software.prefetched:
            both = max(load, gathered + reduced)
        else:
            both = gathered + (max(load, reduced) if software.traced else load + reduced)
        return self._with_jitter(setup.dp * setup.cp, setup.microbatches * both)

    def finish_s(self, setup: Setup) -> float:
        """Seconds that a step takes beyond its pipeline, with their jitter: they add to both bounds."""
        return self._with_jitter(setup.dp * setup.cp, self.step.finish_s(setup)) - self._fixed

    def _with_jitter(self, copies: int, seconds: float) -> float:
        factor = self._factors.get(copies)
        if factor is None:
            factor = self._factors[copies] = 1 + self._jitter * min(10.0, log2(copies))
        return seconds * factor + self._fixed

    def state_bytes(self, setup: Setup) -> int:
        """State of the first pipeline rank."""
        key = (
            *setup[:9],
            setup.virtual,
            setup.schedule in V_SHAPED,
        )
        found = self._state.get(key)
        if found is None:
            found = self._state[key] = sum(self.step.memory.state(setup, 0)[0])
        return found

    def activation_bytes(self, setup: Setup) -> float:
        """What the first pipeline rank keeps of blocks before its first backward, at least."""
        key = (setup.tp, setup.cp, setup.micro_batch, setup.recompute)
        kept = self._kept.get(key)
        if kept is None:
            recompute = setup.recompute if isinstance(setup.recompute, str) else "full"
            mode = "none" if recompute == "full" else recompute
            units = [self.step.memory.unit(kind, setup.cut, mode) for kind in self.kinds]
            kept = self._kept[key] = tuple(unit.kept if recompute == "full" else unit.saved for unit in units)
        total: float = sum(map(mul, self._blocks_held(setup), kept))
        return total

    def _blocks_held(self, setup: Setup) -> Counts:
        """Microbatches times blocks of each kind that the first rank holds, at least."""
        key = (setup.schedule, setup.pp, setup.virtual, setup.microbatches)
        found = self._held.get(key)
        if found is None:
            chunks = zip(first_in_flight(setup), self._places(setup).first, strict=False)
            columns = zip(*([n * count for count in blocks] for n, blocks in chunks), strict=True)
            found = self._held[key] = tuple(map(sum, columns))
        return found

    def device_bytes(self, setup: Setup, state: int, activations: float) -> float:
        """Both with what the allocator and the runtime add, at least."""
        degrees = setup[:6]
        runtime = self._runtime.get(degrees)
        if runtime is None:
            runtime = self._runtime[degrees] = self.step.memory.beside.runtime_bytes(setup)
        return self.step.memory.beside.reserved(setup, state, activations) + runtime


def first_in_flight(setup: Setup) -> tuple[int, ...]:
    """Microbatches that the first rank holds of each of its first chunks before its first backward, at least."""
    pp, m, v = setup.pp, setup.microbatches, setup.virtual
    if setup.schedule == "gpipe":
        return (m,)
    if setup.schedule == "interleaved" and v > 1 and m % pp == 0:
        # Groups of pp microbatches go through all chunks before the next group.
        rounds, rest = divmod(min(m * v, 2 * (pp - 1) + (v - 1) * pp + 1), pp * v)
        return tuple(rounds * pp + min(pp, max(0, rest - chunk * pp)) for chunk in range(v))
    if setup.schedule in V_SHAPED:
        return (min(m, max(1, 2 * pp - (1 if setup.schedule == "zbv" else 2))),)
    return (min(m, pp),)
