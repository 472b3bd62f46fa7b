"""Bytes on each pipeline stage, by category, at the moment of the step that needs most.

Moments
    loss        backward begins on the last stage: every microbatch in flight, the logits, their gradients
    block       backward of the newest microbatch's last block: its working set in place of the logits
    reduce      the last backward: reduced shards of the units that are through with it wait for the update
    optimizer   after the last backward: state, reduced shards, temporaries of the update
    start       when the state is made: one parameter is whole at a time

Categories
    weights, master, gradients, optimizer   state (Rajbhandari 2020, section 5, in the policy's formats)
    activations   saved for backward, times what the schedule keeps in flight
    logits        what head and loss keep and hold
    transients    working set of a backward, units gathered by ZeRO-3, buckets being reduced, temporaries of an update
    buffers       messages between stages; tokens, labels and tables that stay
    workspace     of matrix products
    allocator     reserved by the caching allocator and not allocated
    runtime       context and communicators, which only the device sees
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trigrid.blueprint.claims import claims
from trigrid.blueprint.frozen import kinds_of
from trigrid.blueprint.terms import Claims, Kernels, Saved, made_again, saved_bytes
from trigrid.ledger import Ledger
from trigrid.plan.beside import Beside
from trigrid.plan.compute import Cut
from trigrid.plan.elements import Bucket, trained_numel, unit_buckets
from trigrid.plan.setup import SPLIT_BACKWARD, V_SHAPED, Setup, held_at_once
from trigrid.plan.software import Software
from trigrid.schedule import rank_peak_bytes
from trigrid.spec.model import ModelSpec

DEVICE_ONLY = ("runtime",)
RESERVED_ONLY = ("allocator", *DEVICE_ONLY)


class UnitBytes(NamedTuple):
    """Of one microbatch: saved for backward, kept where the unit is recomputed, worked on in backward, and kept from
    the input backward to the weight backward where the two are apart."""

    saved: float
    kept: float
    working: float
    for_weights: float


class Held(NamedTuple):
    """What one pipeline rank holds: its stages, the blocks of each, all its units, kinds of blocks and of ends."""

    stages: tuple[int, ...]
    chunks: tuple[tuple[tuple[str, int], ...], ...]
    parts: tuple[tuple[str, int], ...]
    layers: int
    blocks: tuple[str, ...]
    ends: tuple[str, ...]
    first: bool
    last: bool


class StageUse(NamedTuple):
    """What one pipeline rank holds, in bytes, at `moment`, the one that needs most; peaks: all that is allocated at
    each moment; moving: of it, what comes and goes during forward and backward; inputs: tokens, labels and tables."""

    rank: int
    layers: int
    parameters: int
    state: tuple[int, int, int, int]
    activations: float
    logits: float
    transients: float
    buffers: float
    inputs: float
    moment: str
    peaks: tuple[tuple[str, float], ...]
    moving: float

    @property
    def training_bytes(self) -> float:
        moving = self.activations + self.logits + self.transients + self.buffers
        return sum(self.state) + moving + self.inputs


@dataclass(frozen=True)
class StageMemory:
    """A stage's ledger. allocated, reserved and device are three different meters (torch's two, nvidia-smi's)."""

    use: StageUse
    ledger: Ledger

    @property
    def total_bytes(self) -> int:
        """As the device sees it."""
        return self.ledger.total_bytes

    @property
    def allocated_bytes(self) -> int:
        return self.total_bytes - sum(self.ledger[name] for name in RESERVED_ONLY)

    @property
    def reserved_bytes(self) -> int:
        return self.total_bytes - sum(self.ledger[name] for name in DEVICE_ONLY)


class Memory:
    """Counts bytes of one model under one software; remembers what it has counted."""

    def __init__(self, spec: ModelSpec, software: Software, values: Mapping[str, float]):
        self.spec, self.software, self.values = spec, software, values
        self.beside = Beside(software, values)
        self.kinds_of_units = kinds_of(spec, software.frozen)
        self._units: dict[tuple[str, Cut, str], UnitBytes] = {}
        self._stages: dict[tuple[object, ...], tuple[tuple[tuple[str, int], ...], ...]] = {}
        self._held: dict[tuple[object, ...], tuple[Held, ...]] = {}
        self._buckets: dict[tuple[int, int], dict[str, tuple[Bucket, ...]]] = {}
        self._state: dict[tuple[object, ...], tuple[tuple[int, int, int, int], int]] = {}

    # Parameters

    def buckets(self, tp: int, ep: int) -> dict[str, tuple[Bucket, ...]]:
        """The buckets of each kind of unit on one TP rank, which engine/buckets cuts in the same way."""
        found = self._buckets.get((tp, ep))
        if found is None:
            kinds = self.kinds_of_units
            found = {kind: unit_buckets(unit, tp, ep, kinds.frozen[kind]) for kind, unit in kinds.units.items()}
            self._buckets[tp, ep] = found
        return found

    def held(self, setup: Setup) -> tuple[Held, ...]:
        """What each pipeline rank holds."""
        key = (setup.pp, setup.virtual, setup.schedule in V_SHAPED, setup.stage_layers)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self._partition(setup)
        return found

    def _partition(self, setup: Setup) -> tuple[Held, ...]:
        split = setup.layers_of(self.spec.layers)
        stages: list[list[int]] = [[] for _ in range(setup.pp)]
        chunks: list[list[tuple[tuple[str, int], ...]]] = [[] for _ in range(setup.pp)]
        before = 0
        for stage, count in enumerate(split):
            rank = setup.holder(stage)
            stages[rank].append(stage)
            chunks[rank].append(tuple(self.kinds(before, count)))
            before += count
        found = []
        for rank in range(setup.pp):
            first, last = 0 in stages[rank], len(split) - 1 in stages[rank]
            kinds: dict[str, int] = {"embedding": 1} if first else {}
            for chunk in chunks[rank]:
                for kind, count in chunk:
                    kinds[kind] = kinds.get(kind, 0) + count
            if last:
                kinds["head"] = 1
            layers = sum(split[stage] for stage in stages[rank])
            blocks = tuple(kind for kind in kinds if kind not in ("embedding", "head"))
            ends = tuple(kind for kind in kinds if kind in ("embedding", "head"))
            parts = tuple(kinds.items())
            found.append(Held(tuple(stages[rank]), tuple(chunks[rank]), parts, layers, blocks, ends, first, last))
        return tuple(found)

    def units_of_stages(self, setup: Setup) -> tuple[tuple[tuple[str, int], ...], ...]:
        """(kind, count) of the units of each stage, in the order of the stages."""
        key = (setup.pp, setup.virtual, setup.stage_layers)
        found = self._stages.get(key)
        if found is None:
            split, before, stages = setup.layers_of(self.spec.layers), 0, []
            for count in split:
                stages.append(tuple(self.kinds(before, count)))
                before += count
            stages[0] = (("embedding", 1), *stages[0])
            stages[-1] = (*stages[-1], ("head", 1))
            found = self._stages[key] = tuple(stages)
        return found

    def parts(self, setup: Setup, rank: int) -> tuple[tuple[str, int], ...]:
        """(kind, count) of the units that pipeline rank `rank` holds."""
        return self.held(setup)[rank].parts

    def kinds(self, first: int, count: int) -> list[tuple[str, int]]:
        """(kind, count) of `count` blocks from number `first` on."""
        found, start = [], 0
        for kind, many in self.kinds_of_units.blocks:
            here = min(first + count, start + many) - max(first, start)
            if here > 0:
                found.append((kind, here))
            start += many
        return found

    def state(self, setup: Setup, rank: int) -> tuple[tuple[int, int, int, int], int]:
        """((weights, master, gradients, optimizer) bytes, parameters) of pipeline rank `rank`, first shard."""
        return self.state_of(setup, self.parts(setup, rank))

    def state_of(self, setup: Setup, parts: tuple[tuple[str, int], ...]) -> tuple[tuple[int, int, int, int], int]:
        """The same of some units, (kind, count) of each."""
        sharing = (setup.dp, setup.cp, setup.dp_replicate, setup.zero, setup.reduce_per_microbatch)
        key = (parts, setup.tp, setup.ep, *sharing)
        found = self._state.get(key)
        if found is None:
            found = self._state[key] = self._count_state(setup, parts)
        return found

    def _count_state(self, setup: Setup, parts: tuple[tuple[str, int], ...]) -> tuple[tuple[int, int, int, int], int]:
        policy, table = self.software.policy, self.buckets(setup.tp, setup.ep)
        shards = setup.shards
        expert_shards = max(1, shards // setup.ep)
        seen: set[str] = set()
        weights = master = gradients = moments = total = 0
        for kind, count in parts:
            for bucket in table[kind]:
                if bucket.name == "tied":
                    if "tied" in seen:
                        continue
                    seen.add("tied")
                for numel, among in ((bucket.dense, shards), (bucket.experts, expert_shards)):
                    if not numel:
                        continue
                    shard = -(-numel // among)
                    whole = shard * among
                    held = shard if setup.zero else whole
                    total += count * numel
                    weights += count * (0 if setup.zero == 3 else whole * policy.weights)
                    if bucket.frozen:
                        # Its shard needs no wider format.
                        master += count * (shard * policy.weights if setup.zero == 3 else 0)
                        continue
                    own = policy.master or (policy.weights if setup.zero == 3 else 0)
                    master += count * held * own
                    gradients += count * policy.gradients * (shard if setup.reduce_per_microbatch else whole)
                    moments += count * policy.moments * (min(shard, numel) if setup.zero else numel)
        return (weights, master, gradients, moments), total

    # Activations

    def unit(self, kind: str, cut: Cut, recompute: str) -> UnitBytes:
        """Bytes of one unit for one microbatch."""
        key = (kind, cut, recompute)
        found = self._units.get(key)
        if found is None:
            found = self._units[key] = self._measure(claims(self.spec, kind, self.software.kernels), cut, recompute)
        return found

    def _measure(self, unit: Claims, cut: Cut, recompute: str) -> UnitBytes:
        size = self.software.policy.compute

        def count(tensors: tuple[Saved, ...], selective: bool = False) -> float:
            return saved_bytes(
                tensors,
                tokens=cut.tokens,
                sequence=cut.sequence,
                tp=cut.tp,
                sequence_parallel=cut.sequence_parallel,
                compute_bytes=size,
                selective=selective,
            )

        saved = count(unit.saved, recompute == "selective")
        entry = Saved("input", self.spec.hidden, "compute", "sequence")
        kept = count((entry,)) if unit.kind != "embedding" else 0.0
        selective = recompute == "selective"
        dropped = tuple(t for t in unit.saved if selective and made_again(t, cut.sequence_parallel))
        working = count(unit.working) + count(dropped)
        for_weights = queued(self.spec, unit, self.software.kernels, cut) * size * cut.tokens
        return UnitBytes(saved, min(kept, saved), working, for_weights)

    def chunk(self, setup: Setup, cut: Cut, kinds: tuple[tuple[str, int], ...]) -> tuple[float, float, float]:
        """Of some blocks, for one microbatch: bytes kept to their backward, working set of the hungriest, and bytes
        kept from there to the weight backward."""
        kept = working = for_weights = 0.0
        assert isinstance(setup.recompute, str), "a chunk has one way to recompute: setup.at(stage)"
        mode = "none" if setup.recompute == "full" else setup.recompute
        for kind, count in kinds:
            unit = self.unit(kind, cut, mode)
            one = unit.working
            if setup.recompute == "full":
                again = round(count * setup.recomputed)
                kept += again * unit.kept + (count - again) * unit.saved
                one += unit.saved - unit.kept if again else 0.0
            else:
                kept += count * unit.saved
            for_weights += count * unit.for_weights
            working = max(working, one)
        return kept, working, for_weights

    # Stages

    def use(self, setup: Setup, rank: int, *, exact: bool = False) -> StageUse:
        """What pipeline rank `rank` holds. exact: activations from the schedule itself, chunk by chunk, where the
        closed form takes the rank's mean chunk."""
        cut, policy, mine = setup.cut, self.software.policy, self.held(setup)[rank]
        state, parameters = self.state(setup, rank)
        stages = zip(mine.stages, mine.chunks, strict=True)
        chunks = [self.chunk(setup.at(stage), cut, kinds) for stage, kinds in stages]
        working = max((chunk[1] for chunk in chunks), default=0.0)
        activations = self._in_flight(setup, rank, chunks, exact)
        first, last = mine.first, mine.last
        embedding = self.unit("embedding", cut, "none").saved if first and setup.at(0).recompute != "full" else 0.0
        activations += embedding * min(setup.microbatches, setup.pp)
        logits = 0.0
        if last:
            head = self.unit("head", cut, "none")
            waiting = setup.microbatches if setup.schedule == "gpipe" else 1
            again = setup.at(setup.pp * setup.virtual - 1).recompute == "full"
            logits = (1 if again else waiting) * head.saved + head.working
            if setup.schedule == "zb-h1" and self.software.kernels.loss != "pieces":
                # What its product puts off for the weights waits beside the microbatch at hand.
                logits += (min(setup.microbatches, setup.pp) - 1) * head.for_weights
        table = self.buckets(setup.tp, setup.ep)
        if last and self.software.kernels.loss == "pieces":
            # The pieces' gradients of the head's weight, not its norm's, are added up in fp32.
            weight = trained_numel(table["head"]) - self.spec.hidden
            logits += max(0, weight) * max(4, policy.compute)
        block = max((sum(b.numel for b in table[kind]) for kind in mine.blocks), default=0)
        end = max((sum(b.numel for b in table[kind]) for kind in mine.ends), default=0)
        trained, trained_end = (
            max((trained_numel(table[k]) for k in ks), default=0) for ks in (mine.blocks, mine.ends)
        )
        gathered, reduced = self._zero_bytes(setup)
        at_block = working + block * (1 + self.software.prefetched) * gathered + trained * reduced
        at_end = end * gathered + trained_end * reduced + block * self.software.prefetched * gathered
        if setup.zero == 3 and not setup.gather_per_use:
            # Gathered once a step: all of them are there until its end.
            at_block += parameters * policy.compute
            at_end += parameters * policy.compute
        at_loss = logits + at_end if last else at_end
        buffers = (2 + (setup.virtual > 1)) * self.boundary_bytes(setup) if setup.pp > 1 else 0.0
        wide = max(at_block, at_loss if last else at_block)
        if setup.shards > 1:
            wide += self.software.bucket_bytes
        updated = (state[3] / policy.moments) if policy.moments else 0.0
        step = self.software.step_bytes * updated
        if setup.zero in (1, 2):
            step += max(trained, trained_end) * policy.gather
        training = activations + wide + buffers
        base = sum(state)
        start = max(block, end) * (policy.master or policy.weights)
        peaks: tuple[tuple[str, float], ...] = (
            ("loss", base + activations + at_loss + buffers),
            ("block", base + activations + at_block + buffers),
            ("optimizer", base + step),
            ("start", base + start),
        )
        if step > training:
            return StageUse(
                rank, mine.layers, parameters, state, 0.0, 0.0, step, 0.0, 0.0, "optimizer", peaks, training
            )
        moment = "loss" if last and at_loss >= at_block else "block"
        found = (activations, logits, max(0.0, wide - logits), buffers, 0.0, moment, peaks, training)
        return StageUse(rank, mine.layers, parameters, state, *found)

    def peak_bytes(self, setup: Setup) -> float:
        """What the fullest pipeline rank needs, as the device sees it, in closed form."""
        ranks = fullest_ranks(self.held(setup), setup)
        return max(self.device_bytes(setup, self.use(setup, rank)) for rank in ranks)

    def _in_flight(self, setup: Setup, rank: int, chunks: list[tuple[float, float, float]], exact: bool) -> float:
        name, pp, m, v = setup.schedule, setup.pp, setup.microbatches, setup.virtual
        # With full recomputation what waits for the weight backward is more than what waits for the input's.
        if exact and (len(set(chunks)) > 1 or any(later > kept for kept, _, later in chunks)):
            until_backward, until_weights = ([round(chunk[i]) for chunk in chunks] for i in (0, 2))
            return float(rank_peak_bytes(name, pp, m, rank, until_backward, until_weights))
        kept = sum(chunk[0] for chunk in chunks) / len(chunks)
        later = sum(chunk[2] for chunk in chunks) / len(chunks)
        pairs = held_at_once(name, pp, m, v)[rank]
        if later <= kept:
            pairs = pairs[:1]
        return max([whole * kept + waiting * later for whole, waiting in pairs])

    def _zero_bytes(self, setup: Setup) -> tuple[float, float]:
        """Bytes per parameter of a unit while it is gathered, and while its gradients wait to be reduced."""
        policy = self.software.policy
        gathered = float(policy.compute) if setup.zero == 3 and setup.gather_per_use else 0.0
        reduced = float(policy.reduce) if setup.reduce_per_microbatch else 0.0
        if reduced and policy.reduce != policy.compute and self.software.both_gradients:
            reduced += policy.compute
        return gathered, reduced

    def boundary_bytes(self, setup: Setup) -> float:
        """What one microbatch hands from stage to stage on one rank."""
        cut = setup.cut
        divided = cut.tp if cut.sequence_parallel else 1
        return cut.tokens * self.spec.hidden * self.software.policy.compute / divided

    def ledger(self, setup: Setup, use: StageUse) -> Ledger:
        """The whole ledger of a stage, as the device sees it."""
        values = self.values
        weights, master, gradients, optimizer = use.state
        inside = {
            "weights": weights,
            "master": master,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": round(use.activations),
            "logits": round(use.logits),
            "transients": round(use.transients),
            "buffers": round(use.buffers + use.inputs),
            "workspace": round(values["memory.workspace_bytes"]),
        }
        inside["allocator"] = max(0, round(self.reserved_bytes(setup, use)) - sum(inside.values()))
        return Ledger({**inside, "runtime": round(self.beside.runtime_bytes(setup))})

    def allocated_bytes(self, use: StageUse) -> float:
        """All that a stage allocates, without making its ledger."""
        return use.training_bytes + self.values["memory.workspace_bytes"]

    def reserved_bytes(self, setup: Setup, use: StageUse) -> float:
        """The same with what the allocator keeps beside it. Temporaries of the update are few and large: no gaps."""
        moving = use.moving + self.values["memory.workspace_bytes"]
        stays = sum(use.state) + use.inputs
        return max(self.beside.reserved(setup, stays, moving), self.allocated_bytes(use))

    def device_bytes(self, setup: Setup, use: StageUse) -> float:
        """The ledger's total, without making one."""
        return self.reserved_bytes(setup, use) + self.beside.runtime_bytes(setup)


def queued(spec: ModelSpec, unit: Claims, kernels: Kernels, cut: Cut) -> float:
    """Elements per token that wait from an input backward to its weight backward: the gradient of each product's
    output, and its input, once where neighbours share it."""
    many = spec.experts.top_k if spec.experts else 1
    shards = cut.tp if cut.sequence_parallel and kernels.regather else 1
    found, before = 0.0, None
    for product in unit.gemms:
        times = many if product.routed else 1
        columns = product.cut == "out"
        found += times * product.out / (cut.tp if columns else 1)
        entry = (product.into, product.routed) if columns else None
        if entry is None or entry != before:
            found += times * product.into / (shards if columns else cut.tp if product.cut == "into" else 1)
        before = entry
    return found


def fullest_ranks(held: Sequence[Held], setup: Setup) -> tuple[int, ...]:
    """The ranks of which one is the fullest: of each kind the first, since early ranks keep most in flight, and, where
    a schedule splits the backward, the last, since late ones put off most weights' gradients."""
    first: dict[object, int] = {}
    last: dict[object, int] = {}
    for rank, mine in enumerate(held):
        kind = (mine.parts, mine.first, mine.last, *(setup.at(stage).recompute for stage in mine.stages))
        first.setdefault(kind, rank)
        last[kind] = rank
    return tuple(sorted({*first.values(), *(last.values() if setup.schedule in SPLIT_BACKWARD else ())}))
