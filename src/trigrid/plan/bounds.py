"""What no replay can beat: lower bounds on the seconds and the bytes of a layout, from a few numbers.

A search asks for them before it prices: a layout whose bound is worse than what is known already needs no price.

Time: every pipeline rank works m times its own stages; before its first forward the stages before it are passed once
forward, and after its last backward once back (schedules that split the backward may end with weights: there only the
forward counts). And one microbatch goes through all stages and back. Collectives of each use of a weight, reductions
and the optimizer only add to that. Memory: the state of the first rank, and what its schedule keeps in flight before
its first backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2
from operator import mul
from typing import NamedTuple

from trigrid.plan.memory import communicators
from trigrid.plan.setup import SPLIT_BACKWARD, V_SHAPED, Setup
from trigrid.plan.step import Step

Counts = tuple[int, ...]
"""Blocks of each kind, in the order of the model."""


class Rank(NamedTuple):
    """A pipeline rank: its blocks, those of the stages before its first one, and whether it holds the two ends."""

    blocks: Counts
    before: Counts
    first: bool
    last: bool


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
        self.kinds = tuple(kind for kind, _ in memory.kinds(0, layers))
        self.counts = tuple(count for _, count in memory.kinds(0, layers))
        # Without the pipeline's stride the other axes are as near as they can be.
        self._order = ("pp", *(axis for axis in setup.order if axis != "pp"))
        self._units: dict[tuple[object, ...], Units] = {}
        self._ranks: dict[tuple[int, int, bool], tuple[Rank, ...]] = {}
        self._saved: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._chunks: dict[tuple[int, int, bool], tuple[Counts, ...]] = {}
        self._state: dict[tuple[object, ...], int] = {}
        values = step.machine.values
        self._jitter = values["jitter.share"] / 10
        self._context_bytes, self._communicator_bytes = (
            values["memory.context_bytes"],
            values["memory.communicator_bytes"],
        )
        self._fixed = values[f"step.{step.software.generation}"]

    def units(self, tp: int, cp: int, ep: int, micro_batch: int, recompute: str) -> Units:
        key = (tp, cp, ep, micro_batch, recompute)
        found = self._units.get(key)
        if found is None:
            ends = (0, *self.counts, 0)
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
            first, *blocks, last = self.step.stages(setup)
            chunks = (first, *blocks, last)
            found = self._units[key] = Units(
                forward=tuple(c.forward_s / max(1, n) for c, n in zip(blocks, self.counts, strict=True)),
                into=tuple(c.input_s / max(1, n) for c, n in zip(blocks, self.counts, strict=True)),
                whole=tuple(c.total_s / max(1, n) for c, n in zip(blocks, self.counts, strict=True)),
                embedding=(first.forward_s, first.total_s, first.input_s),
                head=(last.forward_s, last.total_s, last.input_s),
                forward_s=sum(c.forward_s for c in chunks),
                through_s=sum(c.forward_s + c.input_s for c in chunks),
                work_s=sum(c.total_s for c in chunks),
            )
        return found

    def ranks(self, setup: Setup) -> tuple[Rank, ...]:
        """The ranks that may be the slowest: the first with most blocks, and the last."""
        key = (setup.pp, setup.virtual, setup.schedule in V_SHAPED)
        found = self._ranks.get(key)
        if found is None:
            held, memory = self.step.memory.held(setup), self.step.memory
            split = setup.layers_of(self.step.spec.layers)
            chosen = {max(range(setup.pp), key=lambda rank: held[rank].layers), setup.pp - 1}
            found = self._ranks[key] = tuple(
                Rank(
                    self._vector(held[rank].parts),
                    self._vector(memory.kinds(0, sum(split[: held[rank].stages[0]]))),
                    held[rank].first,
                    held[rank].last,
                )
                for rank in chosen
            )
        return found

    def _vector(self, parts: Iterable[tuple[str, int]]) -> Counts:
        counts = dict(parts)
        return tuple(counts.get(kind, 0) for kind in self.kinds)

    def ideal_s(self, setup: Setup) -> float:
        """Seconds if the work were spread evenly and nobody waited: a bound for all schedules of these degrees."""
        units = self.units(setup.tp, setup.cp, setup.ep, setup.micro_batch, setup.recompute)
        return self._with_jitter(setup, setup.microbatches * units.work_s / setup.pp)

    def step_s(self, setup: Setup) -> float:
        """Seconds that no replay of `setup` beats."""
        units = self.units(setup.tp, setup.cp, setup.ep, setup.micro_batch, setup.recompute)
        m, split = setup.microbatches, setup.schedule in SPLIT_BACKWARD
        passed = units.forward if split else units.whole
        best = units.through_s
        for blocks, before, first, last in self.ranks(setup):
            load = sum(map(mul, blocks, units.whole))
            fill = sum(map(mul, before, passed))
            if first:
                load += units.embedding[1]
            else:
                fill += units.embedding[0 if split else 1]
            if last:
                load += units.head[1]
            best = max(best, m * load + fill)
        if split:
            best = max(best, self._first_rank_s(setup, units))
        return self._with_jitter(setup, best)

    def _first_rank_s(self, setup: Setup, units: Units) -> float:
        """The first rank's work, and its wait for the first microbatch to come back, less the forwards meanwhile."""
        pp, m, v_shaped = setup.pp, setup.microbatches, setup.schedule in V_SHAPED
        chunks = self._chunks_of_first(setup)
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

    def _chunks_of_first(self, setup: Setup) -> tuple[Counts, ...]:
        placed = (setup.pp, setup.virtual, setup.schedule in V_SHAPED)
        chunks = self._chunks.get(placed)
        if chunks is None:
            chunks = self._chunks[placed] = tuple(map(self._vector, self.step.memory.held(setup)[0].chunks))
        return chunks

    def _with_jitter(self, setup: Setup, seconds: float) -> float:
        return seconds * (1 + self._jitter * min(10.0, log2(setup.world))) + self._fixed

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
        cut = setup.cut
        kept = self._saved.get((cut, setup.recompute))
        if kept is None:
            mode = "none" if setup.recompute == "full" else setup.recompute
            units = [self.step.memory.unit(kind, cut, mode) for kind in self.kinds]
            kept = tuple(unit.kept if setup.recompute == "full" else unit.saved for unit in units)
            self._saved[cut, setup.recompute] = kept
        total = 0.0
        for microbatches, blocks in zip(first_in_flight(setup), self._chunks_of_first(setup), strict=False):
            total += microbatches * sum(map(mul, blocks, kept))
        return total

    def device_bytes(self, setup: Setup, state: int, activations: float) -> float:
        """Both with what the allocator and the runtime add, at least."""
        runtime = self._context_bytes + communicators(setup) * self._communicator_bytes
        return (state + activations) / self.step.memory.reserved_share + runtime


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
