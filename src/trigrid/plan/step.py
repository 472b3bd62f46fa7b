"""Seconds of a training step, in closed form or with the schedule replayed, as parts that sum to it.

Parts (of the rank that works longest)
    compute      forward, backward and what is recomputed
    tp, cp, ep   their collectives, as far as nothing runs beside them
    zero         weights gathered and gradients reduced once per use, likewise
    p2p          stage boundaries
    idle         the pipeline's bubble, and waiting for slower stages
    reduce       data parallelism's reductions once per step, beyond the last backward
    gather       ... and its gathers, beyond the first forward
    tied         the tied embedding's sum between first and last stage
    optimizer    the update's passes over memory
    jitter       waiting for the slowest copy of the model
    fixed        what every step costs
`links` holds how long the wires of a part are busy: what is exposed is never more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from trigrid.blueprint.claims import claims
from trigrid.blueprint.frozen import entered_again
from trigrid.plan.compute import Compute
from trigrid.plan.elements import trained_numel
from trigrid.plan.engine_memory import memory_of
from trigrid.plan.machine import Machine
from trigrid.plan.network import Network
from trigrid.plan.pipeline import Chunk, Pipeline, Shape, closed_form, durations, estimate, pipeline_of, shape_of
from trigrid.plan.places import Groups, groups_of
from trigrid.plan.setup import V_SHAPED, Setup
from trigrid.plan.software import Software
from trigrid.schedule import end_s
from trigrid.spec.model import ModelSpec

LINKS = ("tp", "cp", "ep", "zero", "p2p", "reduce", "gather", "tied")
PARTS = ("compute", "tp", "cp", "ep", "zero", "p2p", "idle", "reduce", "gather", "tied", "optimizer", "jitter", "fixed")


Units = tuple[tuple[str, int], ...]


class Regions(NamedTuple):
    """TP regions of a unit: those that it enters and leaves, those that its backward enters by leaving them, and those
    whose whole input the gradients of weights need."""

    enters: int
    leaves: int
    left: int
    needed: int


@dataclass(frozen=True)
class StepTime:
    """parts_s sum to step_s. links_s: busy wires of a part. bubble_ratio: idle ÷ busy, idle_share: idle ÷ pipeline, of
    all ranks together. pipeline: the stages, which take pipeline_s for all microbatches."""

    step_s: float
    parts_s: dict[str, float]
    links_s: dict[str, float]
    bubble_ratio: float
    idle_share: float
    pipeline: Pipeline
    pipeline_s: float


class Step:
    """Prices steps of one model on one machine under one software; remembers units, chunks and groups."""

    def __init__(self, spec: ModelSpec, machine: Machine, software: Software, number_format: str = "bf16"):
        self.spec, self.machine, self.software = spec, machine, software
        self.compute = Compute(spec, machine, software, number_format)
        self.network = Network(machine)
        self.memory = memory_of(spec, software, machine.values)
        self._slower = machine.values["overlap.slowdown"] - 1.0
        self._tail = machine.values["overlap.tail"]
        self._hbm = machine.hbm(software.generation)
        self._groups: dict[tuple[object, ...], Groups] = {}
        self._priced: dict[tuple[str, tuple[object, ...]], Chunk] = {}
        self._pipelines: dict[tuple[object, ...], Pipeline] = {}
        self._shapes: dict[tuple[object, ...], Shape] = {}
        self._transfers: dict[tuple[object, ...], tuple[float, float, int]] = {}

    # Where ranks sit

    def groups(self, setup: Setup) -> Groups:
        key = (setup.tp, setup.cp, setup.pp, setup.dp, setup.ep, setup.dp_replicate, setup.order)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = groups_of(setup, self.machine)
        return found

    # Stages

    def _price(self, setup: Setup, kinds: Units) -> Chunk:
        key = self._setting(setup)
        columns = []
        for kind, count in kinds:
            unit = self._priced.get((kind, key))
            if unit is None:
                unit = self._priced[kind, key] = self._unit(setup, kind)
            columns.append([count * value for value in unit])
        return Chunk(*map(sum, zip(*columns, strict=True)))

    def _setting(self, setup: Setup) -> tuple[object, ...]:
        """What the time of a unit depends on."""
        per_use = setup.gather_per_use or setup.reduce_per_microbatch
        placed = per_use or setup.cp > 1 or setup.ep > 1
        zero = (setup.dp, setup.dp_replicate, setup.gather_per_use, setup.reduce_per_microbatch) if placed else ()
        return (setup.cut, setup.recompute, setup.recomputed, setup.imbalance, setup.order, setup.pp, *zero)

    def _unit(self, setup: Setup, kind: str) -> Chunk:
        cut, software = setup.cut, self.software
        time = self.compute.unit(kind, cut)
        unit = claims(self.spec, kind, software.kernels)
        block, still = kind not in ("embedding", "head"), self.memory.kinds_of_units.frozen[kind]
        forward, into, weight = time.forward_s, time.input_s, time.weight_s
        if setup.imbalance > 1.0:
            extra = time.routed_s * (setup.imbalance - 1.0)
            forward, into, weight = forward + extra, into + extra, weight + extra
        repeats = setup.recomputed if block and setup.recompute == "full" else 0.0
        cheap = block and setup.recompute == "selective"
        in_pieces = kind == "head" and software.kernels.loss == "pieces"
        again = repeats * forward + (time.again_s if cheap or in_pieces else 0.0)

        # Of a frozen embedding nothing has a gradient, and of weights that are frozen nothing is gathered again.
        left = unit.leaves if block or kind not in still else 0
        trained = {parameter.role for parameter in self.memory.kinds_of_units.units[kind].parameters} - still
        regions = Regions(unit.enters, unit.leaves, left, entered_again(trained) if block else unit.enters)
        tp_forward, tp_backward, tp_link = self._tensor_parallel(setup, regions, forward, weight)
        tp_again = repeats * tp_forward
        tp_link += repeats * tp_forward
        cp_forward, cp_backward, cp_link = self._context_parallel(setup, len(unit.attends), time.attend_s)
        ep_forward, ep_link = self._expert_parallel(setup, kind)
        cp_again, ep_again = repeats * cp_forward, repeats * ep_forward
        cp_link, ep_link = cp_link + cp_again, ep_link + ep_again

        front = forward + tp_forward + cp_forward + ep_forward
        back = into + weight + again + tp_backward + tp_again + cp_backward + cp_again + ep_forward + ep_again
        zero_forward, zero_backward, zero_link = self._per_use(setup, kind, front, back)
        added = self._accumulate(setup, kind)
        return Chunk(
            front + zero_forward,
            back - weight + zero_backward,
            weight + added,
            tp_forward + tp_backward + tp_again,
            cp_forward + cp_backward + cp_again,
            2 * ep_forward + ep_again,
            zero_forward + zero_backward,
            tp_link,
            cp_link,
            ep_link,
            zero_link,
        )

    def _tensor_parallel(
        self, setup: Setup, regions: Regions, forward_s: float, weight_s: float
    ) -> tuple[float, float, float]:
        """(exposed forward, exposed backward, link) seconds of a unit's TP collectives."""
        if setup.tp == 1:
            return 0.0, 0.0, 0.0
        payload = setup.cut.tokens * self.spec.hidden * self.software.policy.compute
        group, network = self.groups(setup).tp, self.network
        gather, scatter = network.gather_s(payload, group), network.scatter_s(payload, group)
        enters, leaves, left, entered = regions
        if setup.sequence_parallel:
            forward, backward = enters * gather + leaves * scatter, enters * scatter + left * gather
            again = entered * gather if self.software.kernels.regather else 0.0
        else:
            whole = network.reduce_s(payload, group)
            forward, backward, again = leaves * whole, enters * whole, 0.0
        link = forward + backward + again
        beside = self.software.overlap_tp
        if beside == "async":
            hidden = 1.0 - self._tail
            return (
                forward - min(hidden * forward, forward_s),
                backward + again - min(hidden * (backward + again), forward_s + weight_s),
                link,
            )
        if beside == "weights":
            # Sums of input gradients run beside weight gradients; inputs gathered again beside input gradients.
            able = (enters * scatter if setup.sequence_parallel else backward) + again
            return forward, backward + again - min((1.0 - self._tail) * able, 0.7 * weight_s), link
        return forward, backward + again, link

    def _context_parallel(self, setup: Setup, attends: int, attend_s: float) -> tuple[float, float, float]:
        """Keys and values travel around the ring beside the attention; backward also carries their gradients."""
        if setup.cp == 1 or not attends:
            return 0.0, 0.0, 0.0
        width = 2 * self.spec.kv_heads * self.spec.head_dim / min(setup.tp, self.spec.kv_heads)
        payload = attends * width * setup.cut.tokens * setup.cp * self.software.policy.compute
        one = self.network.gather_s(payload, self.groups(setup).cp)
        forward = max(self._tail * one, one - attend_s)
        backward = max(self._tail * 2 * one, 2 * one - 2.5 * attend_s)
        return forward, backward, 3 * one

    def _expert_parallel(self, setup: Setup, kind: str) -> tuple[float, float]:
        """(seconds of one direction, link of both): tokens go to their experts and come back."""
        experts = self.spec.experts
        if setup.ep == 1 or kind != "moe" or experts is None:
            return 0.0, 0.0
        divided = setup.tp if setup.cut.sequence_parallel else 1
        sent = setup.cut.tokens / divided * experts.top_k * self.spec.hidden * self.software.policy.compute
        one = 2 * self.network.exchange_s(sent * setup.imbalance, self.groups(setup).ep)
        return one, 2 * one

    def _per_use(self, setup: Setup, kind: str, front_s: float, back_s: float) -> tuple[float, float, float]:
        """What ZeRO's collectives of each use add to forward and backward, and their link seconds."""
        if not (setup.gather_per_use or setup.reduce_per_microbatch):
            return 0.0, 0.0, 0.0
        gather, reduce = self._unit_transfers(setup, kind)
        gather = gather if setup.gather_per_use else 0.0
        reduce = reduce if setup.reduce_per_microbatch else 0.0
        if not self.software.prefetched:
            # This project's engine reduces beside the next unit's backward in any case.
            hidden = reduce and self.software.traced
            exposed = max(reduce, back_s + self._slower * min(reduce, back_s)) - back_s if hidden else reduce
            return gather, gather + min(exposed, reduce), 2 * gather + reduce
        forward = max(gather, front_s + self._slower * min(gather, front_s)) - front_s
        both = gather + reduce
        backward = max(both, back_s + self._slower * min(both, back_s)) - back_s
        return min(forward, gather), min(backward, both), 2 * gather + reduce

    def _unit_transfers(self, setup: Setup, kind: str) -> tuple[float, float]:
        """Seconds to gather a unit's weights over the shard group, and to reduce its gradients over all copies."""
        policy, groups, network = self.software.policy, self.groups(setup), self.network
        gather = reduce = 0.0
        for bucket in self.memory.buckets(setup.tp, setup.ep)[kind]:
            for numel, shards in ((bucket.dense, groups.zero), (bucket.experts, groups.expert_zero)):
                if not numel:
                    continue
                if setup.zero == 3 or not bucket.frozen:
                    gather += network.gather_s(numel * policy.gather, shards)
                if bucket.frozen:
                    continue
                if setup.zero == 0 or (self.software.all_reduces and setup.zero == 1):
                    whole = groups.batch if shards is groups.zero else groups.expert_zero
                    reduce += network.reduce_s(numel * policy.reduce, whole)
                else:
                    reduce += network.scatter_s(numel * policy.reduce, shards)
                    reduce += network.reduce_s(numel * policy.reduce / shards.size, groups.replicate)
        return gather, reduce

    def _accumulate(self, setup: Setup, kind: str) -> float:
        """Adding one microbatch's gradients to those of the step. Where those of each microbatch are reduced by
        themselves, this project's engine writes them without reading what was there, but reads them again to look for
        the largest of each parameter, and adds the reduced shard."""
        numel = trained_numel(self.memory.buckets(setup.tp, setup.ep)[kind])
        each = self.software.accumulate
        if self.software.traced and setup.reduce_per_microbatch:
            each += self.software.policy.reduce * 3 / setup.shards
        return numel * each / self._hbm

    # Step

    def pipeline(self, setup: Setup) -> Pipeline:
        """The stages and what a step needs of them, made once for all batch sizes and most ways to shard."""
        key = (*self._setting(setup), setup.virtual, setup.schedule in V_SHAPED, setup.stage_layers)
        found = self._pipelines.get(key)
        if found is None:
            shape = self._shape(setup)
            firsts = [shape.placed.index(kind) for kind in range(len(shape.kinds))]
            alone = zip(firsts, shape.kinds, strict=True)
            chunks = tuple([self._price(setup.at(stage), kinds) for stage, kinds in alone])
            found = self._pipelines[key] = pipeline_of(shape, chunks)
        return found

    def _shape(self, setup: Setup) -> Shape:
        words = setup.recompute if not isinstance(setup.recompute, str) else ("",) * (setup.pp * setup.virtual)
        key = (setup.virtual, setup.schedule in V_SHAPED, setup.stage_layers, words)
        found = self._shapes.get(key)
        if found is None:
            held = [rank.stages for rank in self.memory.held(setup)]
            found = self._shapes[key] = shape_of(self.memory.units_of_stages(setup), held, words)
        return found

    def time(self, setup: Setup, *, play: bool = False) -> StepTime:
        """The step; `play` replays the schedule, else a closed form that no replay exceeds (see `closed_form`)."""
        piped, pp, m = self.pipeline(setup), setup.pp, setup.microbatches
        message = self._message_s(setup)
        if pp == 1:
            pipeline = m * piped.longest_s
        elif play:
            pipeline = end_s(setup.schedule, pp, m, setup.virtual, durations(setup, piped.stages, message))
        else:
            pipeline = closed_form(setup, piped, message)
        waiting = max(0.0, pipeline - m * piped.longest_s)
        p2p_link = 2 * m * message * setup.virtual if pp > 1 else 0.0
        p2p = min(waiting, p2p_link * (pp - 1) / pp)
        tp, cp, ep, zero = piped.exposed
        compute = piped.longest_s - tp - cp - ep - zero
        gather, reduce, tied, optimizer, gather_link, reduce_link = self._finish(setup, piped)
        known = m * piped.longest_s + waiting + gather + reduce + tied + optimizer
        values = self.machine.values
        jitter = known * self._jitter_share(setup)
        fixed = values[f"step.{self.software.generation}"]
        spent = (m * compute, m * tp, m * cp, m * ep, m * zero, p2p, waiting - p2p, reduce, gather, tied, optimizer)
        parts = dict(zip(PARTS, (*spent, jitter, fixed), strict=True))
        busy = tuple(m * link for link in piped.links)
        links = dict(zip(LINKS, (*busy, p2p_link, reduce_link, gather_link, tied), strict=True))
        total = m * piped.sum_s
        idle = max(0.0, pp * pipeline - total)
        return StepTime(known + jitter + fixed, parts, links, idle / total, idle / (pp * pipeline), piped, pipeline)

    def estimate_s(self, setup: Setup) -> float:
        """About the step's seconds, without its parts: the price by which a search sorts what it may replay."""
        piped, m = self.pipeline(setup), setup.microbatches
        seconds = m * piped.longest_s if setup.pp == 1 else estimate(setup, piped, self._message_s(setup))
        known = seconds + self.finish_s(setup)
        return known * (1.0 + self._jitter_share(setup)) + self.machine.values[f"step.{self.software.generation}"]

    def _jitter_share(self, setup: Setup) -> float:
        """Copies of the model meet once a step, and wait for the slowest. What meets for every microbatch, a pipeline's
        stages and TP's ranks, waits in every measured step, and the fitted rates have it in them."""
        return self.machine.values["jitter.share"] * min(1.0, log2(setup.dp * setup.cp) / 10)

    def finish_s(self, setup: Setup) -> float:
        """Seconds of the step beyond the pipeline, but for jitter and what every step costs."""
        return sum(self._finish(setup, self.pipeline(setup))[:4])

    def _finish(self, setup: Setup, piped: Pipeline) -> tuple[float, float, float, float, float, float]:
        """Seconds of gather, reduce, tied sum and optimizer beyond the pipeline, and of the links of the first two:
        what comes before the first forward and after the last backward of the first rank, which ends last."""
        software, policy = self.software, self.software.policy
        gather, reduce, units = self.transfers(setup)
        gather_link = gather if setup.zero and not setup.gather_per_use else 0.0
        reduce_link = 0.0 if setup.reduce_per_microbatch else reduce
        window = piped.first_backward_s * (units - 1) / units if software.overlap_dp else 0.0
        exposed_reduce = self._beyond(reduce_link, window, units)
        window = piped.first_forward_s * (units - 1) / units if software.overlap_gather else 0.0
        exposed_gather = self._beyond(gather_link, window, units)
        if setup.gather_per_use:
            # The first unit's gather and the last one's reduction have nothing to run beside.
            block_gather, block_reduce = self._unit_transfers(setup, self.memory.kinds(self.spec.layers - 1, 1)[0][0])
            exposed_gather = gather_link = block_gather
            if setup.reduce_per_microbatch:
                exposed_reduce = reduce_link = block_reduce
        tied = self._tied_s(setup) if self.spec.tied and setup.pp > 1 else 0.0
        state, parameters = self.memory.state(setup, 0)
        updated = state[3] / policy.moments if policy.moments else float(parameters)
        # The norm reads the gradients once more, and clearing them writes all.
        passes = 2 * policy.gradients + 2 * (policy.master or policy.weights) + 2 * policy.moments + policy.weights
        optimizer = (updated * passes + state[2]) / self._hbm
        return exposed_gather, exposed_reduce, tied, optimizer, gather_link, reduce_link

    def transfers(self, setup: Setup) -> tuple[float, float, int]:
        """Seconds to gather and to reduce all units of the first rank, and how many they are."""
        shape = (setup.stage_layers, setup.virtual, setup.schedule in V_SHAPED)
        degrees = (setup.tp, setup.cp, setup.pp, setup.dp, setup.ep, setup.dp_replicate)
        key = (*degrees, setup.zero, setup.order, *shape)
        found = self._transfers.get(key)
        if found is None:
            gather = reduce = 0.0
            units = 0
            for kind, count in self.memory.parts(setup, 0):
                one_gather, one_reduce = self._unit_transfers(setup, kind)
                gather, reduce, units = gather + count * one_gather, reduce + count * one_reduce, units + count
            found = self._transfers[key] = (gather, reduce, max(1, units))
        return found

    def _beyond(self, link_s: float, window_s: float, units: int) -> float:
        """What is left of `link_s` beside a window of compute, which it slows down while they overlap."""
        if not window_s:
            return link_s
        hidden = min(link_s * (1 - 1 / units), window_s)
        return min(link_s, link_s - hidden + self._slower * hidden)

    def _message_s(self, setup: Setup) -> float:
        if setup.pp == 1:
            return 0.0
        payload = self.memory.boundary_bytes(setup)
        if self.software.cut_boundaries and not setup.cut.sequence_parallel:
            payload /= setup.tp
        return self.network.message_s(payload, self.groups(setup).neighbours)

    def _tied_s(self, setup: Setup) -> float:
        tied = [bucket for bucket in self.memory.buckets(setup.tp, setup.ep)["head"] if bucket.name == "tied"]
        numel = trained_numel(tied)
        if not numel:
            return 0.0
        if self.software.tied_on_shards and setup.zero:
            numel = numel // setup.shards
        return 2 * self.network.message_s(numel * self.software.policy.reduce / 2, self.groups(setup).ends)

    def traffic_bytes(self, setup: Setup) -> dict[str, float]:
        """Payload that the first pipeline rank gives its collectives and messages in one step, by axis, as
        plan/traffic.py counts calls of the engine; what is smaller than a block's tensor is left out."""
        cut, policy, m = setup.cut, self.software.policy, setup.microbatches
        region = cut.tokens * self.spec.hidden * policy.compute
        tp = zero = replicate = 0.0
        stages = self.memory.held(setup)[0].stages
        full = sum(setup.at(stage).recompute == "full" for stage in stages) / len(stages)
        for kind, count in self.memory.parts(setup, 0):
            unit = claims(self.spec, kind, self.software.kernels)
            again = full * (unit.enters + unit.leaves)
            tp += count * region * ((unit.enters + unit.leaves) * (2 if cut.sequence_parallel else 1) + again)
            buckets = self.memory.buckets(setup.tp, setup.ep)[kind]
            numel = trained_numel(buckets)
            given = sum(bucket.numel for bucket in buckets) if setup.zero == 3 else numel
            zero += count * numel * policy.reduce * (m if setup.reduce_per_microbatch else 1)
            zero += count * given * policy.gather * (2 * m if setup.gather_per_use else min(setup.zero, 1))
            replicate += count * numel * policy.reduce / (setup.shards if setup.zero else 1)
        found = {
            "tp": m * tp if setup.tp > 1 else 0.0,
            "zero": zero if setup.shards > 1 else 0.0,
            "replicate": replicate if setup.dp_replicate > 1 else 0.0,
            "pp": 2 * m * setup.virtual * self.memory.boundary_bytes(setup) if setup.pp > 1 else 0.0,
        }
        return {axis: amount for axis, amount in found.items() if amount}
