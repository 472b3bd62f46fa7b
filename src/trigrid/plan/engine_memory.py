"""Memory of this project's engine: every action of a rank's schedule, with what is alive while its units work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from trigrid.blueprint.frozen import plain
from trigrid.blueprint.parameters import localise
from trigrid.plan.alive import (
    EMBEDDING,
    HEAD,
    Chunk,
    Moment,
    Shared,
    Sizes,
    Zero,
    line,
    reduced,
)
from trigrid.plan.alive import chunk as make_chunk
from trigrid.plan.backend import copied, scattered
from trigrid.plan.compute import Cut
from trigrid.plan.elements import Bucket
from trigrid.plan.memory import Memory, StageUse, UnitBytes
from trigrid.plan.setup import SPLIT_BACKWARD, V_SHAPED, Setup, held_at_once
from trigrid.plan.software import Software
from trigrid.plan.turns import Fullest, Turns, fullest, named_turns
from trigrid.plan.units import Unit, Working
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

TOKEN = 8
"""Bytes of a token, of its label and of the number of its document."""


def memory_of(spec: ModelSpec, software: Software, values: Mapping[str, float]) -> Memory:
    """What counts the bytes of `spec` under `software`."""
    return (EngineMemory if software.traced else Memory)(spec, software, values)


class EngineMemory(Memory):
    """The same as `Memory`, for the program that `trigrid prove` traces."""

    def __init__(self, spec: ModelSpec, software: Software, values: Mapping[str, float]):
        super().__init__(spec, software, values)
        self._working: dict[tuple[str, Cut, str, bool], Working] = {}
        self._chunks: dict[tuple[object, ...], Chunk] = {}
        self._numel: dict[tuple[int, int], dict[str, Sizes]] = {}
        self._summed: dict[tuple[int, bool], dict[str, int]] = {}

    # Units and stages

    def working(self, kind: str, cut: Cut, recompute: str, splits: bool) -> Working:
        """What a unit has of one microbatch. Units that the engine lacks are counted by what they claim."""
        key = (kind, cut, recompute, splits)
        found = self._working.get(key)
        if found is None:
            if plain(kind) in ("llama", "gpt", EMBEDDING, HEAD) and not (
                self.spec.latent and kind not in (EMBEDDING, HEAD)
            ):
                kernels, size, still = (
                    self.software.kernels,
                    self.software.policy.compute,
                    self.kinds_of_units.frozen[kind],
                )
                found = Unit(self.spec, kernels, cut, size, recompute, splits, still).working(plain(kind))
            else:
                found = self._claimed(self.unit(kind, cut, "none" if recompute == "full" else recompute), recompute)
            self._working[key] = found
        return found

    def _claimed(self, unit: UnitBytes, recompute: str) -> Working:
        kept = unit.kept if recompute == "full" else unit.saved
        whole, later = unit.saved + unit.working, unit.for_weights
        return Working(kept, later, 0.0, unit.saved, whole, max(whole, later), later)

    def chunk(self, setup: Setup, cut: Cut, kinds: tuple[tuple[str, int], ...]) -> tuple[float, float, float]:
        assert isinstance(setup.recompute, str), "a chunk has one way to recompute: setup.at(stage)"
        splits = setup.schedule in SPLIT_BACKWARD
        units = [(self.working(kind, cut, setup.recompute, True), count) for kind, count in kinds]
        kept, later = (sum(count * unit[i] for unit, count in units) for i in (0, 1))
        kept += self._shared(cut, setup.recompute).kept
        working = max((unit.of_input if splits else unit.whole for unit, _ in units), default=0.0)
        return kept, working, later

    def _shared(self, cut: Cut, recompute: str) -> Shared:
        """The mask of documents, a rank's first stage that keeps one for all of them. Blocks that are run again make
        their own."""
        if not self.software.kernels.documents or recompute == "full":
            return Shared()
        numbers, compute = cut.tokens * cut.sequence, self.software.policy.compute
        return Shared(numbers * compute, numbers * (compute + 1))

    def _stage(self, setup: Setup, stage: int, splits: bool, shares: bool) -> Chunk:
        """shares: what its blocks share of a microbatch is not there before."""
        kinds, setup = self.units_of_stages(setup)[stage], setup.at(stage)
        assert isinstance(setup.recompute, str)
        zero = self._zero(setup)
        tied_before = kinds[-1][0] == HEAD and setup.holder(0) == setup.holder(stage)
        shared = self._shared(setup.cut, setup.recompute) if shares else Shared()
        key = (kinds, setup.cut, setup.recompute, zero, splits, setup.ep, setup.bucket_numel, tied_before, shared)
        found = self._chunks.get(key)
        if found is None:
            units = {kind: self.working(kind, setup.cut, setup.recompute, splits) for kind, _ in kinds}
            made = line(kinds, self._sizes(setup), setup.bucket_numel, zero, tied_before)
            found = self._chunks[key] = make_chunk(made, units, zero, self.boundary_bytes(setup), splits, shared)
        return found

    def _sizes(self, setup: Setup) -> dict[str, Sizes]:
        """Of the units of each kind."""
        key = (setup.tp, setup.ep)
        found = self._numel.get(key)
        if found is None:
            table = self.buckets(setup.tp, setup.ep)
            found = self._numel[key] = {kind: sizes_of(buckets) for kind, buckets in table.items()}
        return found

    def _zero(self, setup: Setup) -> Zero:
        policy, shards = self.software.policy, setup.shards
        sharded = shards > 1
        # Among one rank a shard is the whole, and gathering it changes its format at most.
        sent = policy.gather != self._master
        gathers = setup.zero == 3 and setup.gather_per_use
        each, once = setup.reduce_per_microbatch, setup.zero > 0 and sharded and not setup.reduce_per_microbatch
        gloo = self.software.kernels.gloo
        arriving, summed = scattered(policy.reduce, shards, gloo)
        copies = setup.zero == 0 and gloo and shards == 2
        return Zero(
            gathered=policy.compute if gathers and (sharded or sent) else 0.0,
            still=policy.compute if gathers and sharded else 0.0,
            sent=policy.gather / shards if gathers and sharded and sent else 0.0,
            whole=policy.reduce if each else 0.0,
            arriving=arriving if each and sharded else 0.0,
            once=arriving if once else 0.0,
            summed=summed if once else 0.0,
            copied=policy.reduce if copies else 0.0,
            ahead=self.software.prefetched if gathers else 0,
        )

    @property
    def _master(self) -> int:
        return self.software.policy.master or self.software.policy.weights

    # Ranks

    def use(self, setup: Setup, rank: int, *, exact: bool = False) -> StageUse:
        assert setup.recomputed == 1.0, "a stage of this engine recomputes all of its blocks or none"
        chunks = self._of_rank(setup, rank, setup.schedule in SPLIT_BACKWARD)
        if exact or not isinstance(setup.recompute, str):
            named = named_turns(setup.schedule, setup.pp, setup.microbatches, setup.virtual)
            return self._replayed(setup, rank, chunks, named[rank])
        return self._use(setup, rank, chunks, bound(setup, rank, chunks, self.boundary_bytes(setup)))

    def use_of(self, setup: Setup, rank: int, mine: Turns, splits: bool) -> StageUse:
        """The same of a rank that does `mine`; splits: its products put off the gradients of their weights."""
        return self._replayed(setup, rank, self._of_rank(setup, rank, splits), mine)

    def _of_rank(self, setup: Setup, rank: int, splits: bool) -> list[Chunk]:
        stages = self.held(setup)[rank].stages
        first = next((stage for stage in stages if self._keeps_shared(setup, stage)), None)
        return [self._stage(setup, stage, splits, stage == first) for stage in stages]

    def _keeps_shared(self, setup: Setup, stage: int) -> bool:
        blocks = any(kind not in (EMBEDDING, HEAD) for kind, _ in self.units_of_stages(setup)[stage])
        return blocks and setup.at(stage).recompute != "full"

    def _replayed(self, setup: Setup, rank: int, chunks: Sequence[Chunk], mine: Turns) -> StageUse:
        return self._use(setup, rank, chunks, fullest(chunks, mine, self.boundary_bytes(setup)))

    def _use(self, setup: Setup, rank: int, chunks: Sequence[Chunk], full: Fullest) -> StageUse:
        policy, mine, moment = self.software.policy, self.held(setup)[rank], full.moment
        state, parameters = self.state(setup, rank)
        inputs, later = self._inputs(setup)
        # Gathered once a step, whole weights are there until its end.
        kept = parameters * policy.compute if setup.zero == 3 and not setup.gather_per_use else 0.0
        buckets = [numel for chunk in chunks for numel in chunk.buckets]
        shards, summing = reduced(buckets, self._zero(setup))
        update = kept + max(summing, shards + self._finish(setup, mine.parts, max(buckets, default=0)))
        base, largest = sum(state), max(self._sizes(setup)[kind].numel for kind, _ in mine.parts)
        name = moment.unit if moment.unit == EMBEDDING else "loss" if moment.unit == HEAD else "block"
        training = full.total + kept
        fullest_at = "reduce" if full.earlier else name
        peaks = (
            *((("block", base + training + inputs - full.total + full.earlier),) if full.earlier else ()),
            (fullest_at, base + training + inputs),
            ("optimizer", base + update + later),
            ("start", float(base + largest * self._master)),
        )
        found = (rank, mine.layers, parameters, state)
        if update + later > training + inputs:
            return StageUse(*found, 0.0, 0.0, update, 0.0, later, "optimizer", peaks, training)
        activations, logits = full.held + moment.kept, full.heads + moment.head
        buffers = full.messages + moment.arrived
        transients = training - buffers - activations - logits
        return StageUse(*found, activations, logits, transients, buffers, inputs, fullest_at, peaks, training)

    def _inputs(self, setup: Setup) -> tuple[float, float]:
        """Tokens and labels of a step and tables of rotary positions, and all that is there of them before the update:
        tokens and labels again with the sequence first, which is the same for one row. (before, then)"""
        spec, cut = self.spec, setup.cut
        each = TOKEN * (3 if self.software.kernels.documents else 2) * setup.microbatches * cut.tokens
        tables = cut.sequence * spec.head_dim * self.software.policy.compute if spec.block == "llama" else 0
        return tables + each * (2 if setup.micro_batch > 1 else 1), tables + each

    def _finish(self, setup: Setup, parts: Sequence[tuple[str, int]], largest: int) -> float:
        """Beside state and reduced shards, the most that the end of a step has: gradients that are summed over TP, in
        one piece, or the weights of the `largest` bucket, gathered from shards in the gather's format."""
        policy, sums = self.software.policy, self._sums(setup)
        summed = float(sum(count * sums[kind] for kind, count in parts) * policy.reduce)
        if setup.zero:
            summed /= setup.shards
        summed += copied(summed, setup.tp, self.software.kernels.gloo)
        if setup.zero not in (1, 2):
            return summed
        cast = policy.gather / setup.shards if policy.gather != self._master else 0.0
        gathered = policy.gather if setup.shards > 1 else 0.0
        return max(summed, largest * (cast + gathered))

    def _sums(self, setup: Setup) -> dict[str, int]:
        """By kind of unit, elements whose gradients are summed over TP or over the holders of a KV head."""
        key = (setup.tp, setup.sequence_parallel)
        found = self._summed.get(key)
        if found is None:
            layout, kinds = Layout(tp=setup.tp, sequence_parallel=setup.sequence_parallel), self.kinds_of_units
            found = self._summed[key] = {
                kind: sum(
                    local.numel
                    for local in (localise(parameter, layout, 0) for parameter in unit.parameters)
                    if local.sum_group != "none" and local.parameter.role not in kinds.frozen[kind]
                )
                for kind, unit in kinds.units.items()
            }
        return found


def sizes_of(buckets: Sequence[Bucket]) -> Sizes:
    """Of a unit that has `buckets`."""
    trained, still, tied, tied_still = (
        sum(b.numel for b in buckets if (b.name == "tied", b.frozen) == which)
        for which in ((False, False), (False, True), (True, False), (True, True))
    )
    return Sizes(trained, still, tied, tied_still)


def placement(setup: Setup) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    return tuple(setup.holder(stage) for stage in range(setup.pp * setup.virtual))


def bound(setup: Setup, rank: int, chunks: Sequence[Chunk], boundary: float) -> Fullest:
    """Not less than the fullest moment: the most that is under way, and beside it the fullest moment of any action.

    It is that moment where every backward finds as much under way as there ever is, as in 1F1B.
    """
    splits, number = setup.schedule in SPLIT_BACKWARD, len(chunks)
    # Of each neighbour a receive posted ahead and an unfinished send; in a V one taken early, and one handed on where
    # it turns.
    places = placement(setup)
    near = {b for a, b in (*pairwise(places), *pairwise(places[::-1])) if a == rank}
    there = boundary * (2 * len(near - {rank}) + (setup.schedule in V_SHAPED) + (rank in near))
    pairs = held_at_once(setup.schedule, setup.pp, setup.microbatches, setup.virtual)[rank]
    embedding, head = chunks[0].embedding, chunks[-1].head
    blocks = (sum(chunk.kept for chunk in chunks) - embedding - head[0]) / number
    later = (sum(chunk.later for chunk in chunks) - head[1]) / number

    def most(states: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """(all that is under way, the head's part of it) in the fullest of some states."""
        return max(under_way(*state) for state in states)

    def under_way(whole: int, waiting: int) -> tuple[float, float]:
        heads = head[0] * (whole if number == 1 else 1) + (head[1] * waiting if splits or number == 1 else 0.0)
        embeddings = whole + waiting if number == 1 else min(setup.microbatches, 2 * setup.pp)
        return whole * blocks + waiting * later + embedding * embeddings + heads, heads

    # Whole backwards of a schedule that has both kinds come before the others.
    states = [most(pairs), most(pairs[:1]) if splits else most(pairs)]
    never = {1} if setup.schedule in ("zb-h1", "zbv") else set()

    def of(chunk: Chunk, kind: int, moment: Moment) -> Fullest:
        held, heads = states[kind == 1]
        # What is under way counts this microbatch, before the action and after it at most.
        own = max(chunk.before[kind], chunk.after[kind])
        own_head = min(heads, chunk.head[kind == 3])
        return Fullest(
            held - own + moment.total + there, there, held - own - heads + own_head, heads - own_head, moment
        )

    kinds = [kind for kind in range(len(chunks[0].moments)) if kind not in never]
    pending = max(chunk.pending for chunk in chunks)
    fullest = max(of(chunk, kind, chunk.moments[kind].most(pending)) for chunk in chunks for kind in kinds)
    if not any(chunk.reduced for chunk in chunks):
        return fullest
    found = [fullest]
    for at, chunk in enumerate(chunks):
        others = sum(other.reduced for other in chunks[at + 1 :])
        for kind in kinds[1:]:
            moment = chunk.last[kind].most(pending)
            if number == 1 or not splits:
                # Of this stage nothing else is under way, of those before it a round; before, a round of all three.
                round_ = min(setup.microbatches, setup.pp) if number > 1 else 1
                before = sum(other.kept for other in chunks[:at]) * round_
                one = Fullest(before + moment.total + others + there, there, before, 0.0, moment)
                if others:
                    before += chunk.kept * (round_ - 1)
                    earlier = chunk.moments[kind].most(pending)
                    one = max(one, Fullest(before + earlier.total + others + there, there, before, 0.0, earlier))
            else:
                one = of(chunk, kind, moment)
                one = one._replace(total=one.total + sum(other.reduced for other in chunks) - chunk.reduced)
            found.append(one._replace(earlier=fullest.total))
    return max(found)
