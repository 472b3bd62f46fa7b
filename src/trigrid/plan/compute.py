"""Seconds of a unit's operations on one rank: matrix products, attention, memory-bound operations, launches.

Product (m × k by k × n): max(FLOPs ÷ (rate · tiles · k ÷ (k + k½)), bytes ÷ HBM), where `tiles` is the share of the
last wave of output tiles that is filled, for the best of a few tile shapes. Fused attention: the causal half of the
scores, backward 2.5 times the forward (Dao 2022). Memory-bound operations: bytes ÷ HBM. What a calibration has measured
of any of these holds instead (plan/measured.py). A unit takes at least as long as the host needs to start its kernels;
where the host waits for each kernel, as long as both together.
"""

from __future__ import annotations

from typing import NamedTuple

from trigrid.blueprint.claims import claims
from trigrid.blueprint.frozen import kinds_of
from trigrid.blueprint.terms import Attend, Claims, Gemm, Pass
from trigrid.plan.constants import of_generation
from trigrid.plan.machine import Machine
from trigrid.plan.software import Software
from trigrid.spec.model import ModelSpec

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 64, 0.6))
BACKWARD_OF_FUSED_ATTENTION = 2.5


class Cut(NamedTuple):
    """What decides the time of a unit on one rank: degrees, sequences of a microbatch and their length in tokens."""

    tp: int
    cp: int
    ep: int
    sequence_parallel: bool
    micro_batch: int
    sequence: int

    @property
    def tokens(self) -> float:
        return self.micro_batch * self.sequence / self.cp


class UnitTime(NamedTuple):
    """Seconds for one microbatch, without communication. again_s: what selective recomputation runs once more.

    attend_s: attention's part of forward, beside which CP's messages run; routed_s: the experts' part of forward, half
    of their part of backward, which the fullest rank decides.
    """

    forward_s: float
    input_s: float
    weight_s: float
    again_s: float
    attend_s: float = 0.0
    routed_s: float = 0.0


class Compute:
    """Prices units of one model on one machine; remembers what it has priced."""

    def __init__(self, spec: ModelSpec, machine: Machine, software: Software, number_format: str):
        self.spec, self.machine, self.software = spec, machine, software
        values, generation = machine.values, machine.gpu.generation
        half = "bf16" if "bf16" in machine.gpu.peak_flops else "fp16"
        block = number_format if number_format.split("-")[0] in machine.gpu.peak_flops else half
        self._wide = half if block.startswith("fp8") else block
        alone = values[f"products.{software.generation}"]
        self._rates = {True: alone * machine.gemm_flops(block), False: alone * machine.gemm_flops(self._wide)}
        self._hbm = machine.hbm(software.generation)
        self._launch = values["launch.blocking" if software.blocking else f"launch.{software.generation}"]
        self._blocking = software.blocking
        measured = machine.measured
        if measured.launch and not software.blocking:
            self._launch, self._blocking = measured.launch.seconds, measured.launch.blocking
        self._fitted = {True: measured.products.get(block), False: measured.products.get(self._wide)}
        # What was measured is this project's engine, operation by operation.
        own = software.traced and not software.kernels.fused_passes
        self._operations = measured.operations.get(self._wide, {}) if own else {}
        self._alone = alone
        self._half_k = values["gemm.half_k"]
        # Clocks under load hold for attention as well: its share is of the sustained peak.
        peak = machine.gpu.peak_flops[self._wide] * machine.gpu.sustained.get(self._wide, 0.8)
        self._attention = peak * of_generation(values, f"attention.{software.attention}", generation)
        self._half_sequence = values["attention.half_sequence"]
        self._backward = BACKWARD_OF_FUSED_ATTENTION
        if fitted := measured.attention.get(self._wide):
            self._attention, self._half_sequence, self._backward = fitted.flops, fitted.half_sequence, fitted.backward
        self._half_head = values["attention.unfused.half_k"]
        self._cores = machine.gpu.peak_flops[self._wide] * of_generation(values, "attention.unaligned", generation)
        self._grouped = values["moe.grouped"]
        self._bytes = software.policy.compute
        self._frozen = kinds_of(spec, software.frozen).frozen
        self._units: dict[tuple[str, Cut], UnitTime] = {}
        self._products: dict[tuple[float, float, float, bool], float] = {}

    def unit(self, kind: str, cut: Cut) -> UnitTime:
        """The time of a unit of `kind`."""
        key = (kind, cut)
        found = self._units.get(key)
        if found is None:
            unit = claims(self.spec, kind, self.software.kernels)
            still = self._frozen[kind]
            found = self._price(unit, cut, still)
            if kind == "embedding" and kind in still:
                found = found._replace(input_s=0.0)
            self._units[key] = found
        return found

    def _price(self, unit: Claims, cut: Cut, still: frozenset[str]) -> UnitTime:
        """still: roles of weights that have no gradient."""
        tokens, block = cut.tokens, unit.kind not in ("head", "embedding")
        forward = into = weight = again = routed = attention = 0.0
        for gemm in unit.gemms:
            m, n, k, count = _shape(gemm, cut, self.spec)
            # The experts' products are one kernel.
            share = self._grouped if gemm.routed else 1.0
            one = count * self.product_s(m, n, k, block) / share
            forward += one
            into += count * self.product_s(m, k, n, block) / share
            if gemm.role not in still:
                weight += count * self.product_s(n, k, m, block) / share
            if gemm.again:
                again += one
            if gemm.routed:
                routed += one
        for attend in unit.attends:
            one, back, core = self._attend_s(attend, cut, tokens)
            forward, into, again, attention = forward + one, into + back, again + core, attention + one
        selective = self.software.kernels.selective
        kernels = len(unit.gemms) + 2 * len(unit.attends)
        for item in unit.passes:
            divided = cut.tp if item.cut == "tp" or (item.cut == "sequence" and cut.sequence_parallel) else 1
            each = tokens * self._bytes / divided * (cut.sequence if item.scores else 1)
            one, back = self._pass_s(item, each)
            forward += one
            into += back
            # What was measured has its start in it.
            kernels += 0 if item.operation in self._operations else item.kernels
            cheap = item.again and not (item.gathers and cut.sequence_parallel)
            if selective == "alternate" or item.scores or cheap:
                again += one
        host = kernels * self._launch
        host_back = (2 * kernels - sum(gemm.role in still for gemm in unit.gemms)) * self._launch
        if self._blocking:
            slow, slow_back = 1.0 + host / forward, 1.0 + host_back / (into + weight)
        else:
            # The host starts kernels while the device works: where it is slower, the device waits for it.
            slow, slow_back = max(1.0, host / forward), max(1.0, host_back / (into + weight))
        return UnitTime(forward * slow, into * slow_back, weight * slow_back, again * slow, attention, routed)

    def _pass_s(self, item: Pass, each: float) -> tuple[float, float]:
        """Seconds of `item` forward and backward, where an element of each token makes `each` bytes."""
        forward, backward = item.forward * each, item.backward * each
        if measured := self._operations.get(item.operation):
            return measured.seconds(forward, backward=False), measured.seconds(backward, backward=True)
        passes, kernels = self.machine.measured.passes, max(1, item.kernels)
        if not passes:
            return forward / self._hbm, backward / self._hbm
        return forward / passes.rate(forward / kernels), backward / passes.rate(backward / kernels / 2)

    def product_s(self, m: float, n: float, k: float, block: bool) -> float:
        """Seconds of an m × k by k × n product. block: in the blocks' number format, else the wide one."""
        key = (m, n, k, block)
        found = self._products.get(key)
        if found is None and (fitted := self._fitted[block]):
            found = self._products[key] = fitted.seconds(m, n, k) / self._alone
        if found is None:
            sms = self.machine.gpu.sms
            best = 0.0
            for rows, columns, quality in TILES:
                tiles = -(-m // rows) * -(-n // columns)
                waves = -(-tiles // sms)
                best = max(best, quality * m * n / (waves * sms * rows * columns))
            arithmetic = 2 * m * n * k * (k + self._half_k) / (k * self._rates[block] * best)
            moved = self._bytes * (m * k + k * n + m * n) / self._hbm
            found = self._products[key] = max(arithmetic, moved)
        return found

    def _attend_s(self, attend: Attend, cut: Cut, tokens: float) -> tuple[float, float, float]:
        """Seconds of attention forward, backward, and of what selective recomputation runs again."""
        heads = attend.heads / cut.tp
        widths = attend.qk_dim + attend.v_dim
        flops = 2 * heads * widths * tokens * cut.sequence
        if self.software.kernels.fused_attention:
            narrow = narrowness(widths / 2)
            rate = self._attention * narrow * cut.sequence / (cut.sequence + self._half_sequence)
            forward = flops / 2 / rate
            return forward, self._backward * forward, 0.0
        dim = attend.qk_dim
        rate = self._rates[False] * dim / (dim + self._half_head)
        # The matrix units' kernels read 16 bytes at once; heads that do not begin at such an address run without them.
        if dim * self._bytes % 16:
            rate = min(rate, self._cores)
        forward = flops / rate
        # Probabilities take the first of two products; the core as one piece also takes the second.
        again = forward / 2 if self.software.kernels.selective == "cheap" else forward
        return forward, 2 * forward, again


def narrowness(head_dim: float) -> float:
    """What share of the rate with heads of 128 fused attention reaches with others: those of 64 reach 132 to 171
    TFLOP/s where those of 128 reach 141 to 189 (Dao 2023, causal, A100)."""
    return min(1.0, (head_dim + 650) / 778)


def _shape(gemm: Gemm, cut: Cut, spec: ModelSpec) -> tuple[float, float, float, float]:
    """Rows, columns, inner length and number of the products that `gemm` is on one rank.

    A routed product is one for each expert of the rank, on the tokens that all ranks of the EP group send it.
    """
    n, k = gemm.out, gemm.into
    if gemm.routed:
        assert spec.experts is not None
        experts = spec.experts
        rows = max(1.0, cut.tokens * experts.top_k * cut.ep / experts.count)
        n, k = (n // cut.tp, k) if gemm.cut == "out" else (n, k // cut.tp)
        return rows, max(1, n), max(1, k), experts.count / cut.ep
    if gemm.cut == "out":
        n = n // min(cut.tp, gemm.pieces or cut.tp)
    elif gemm.cut == "into":
        k = k // cut.tp
    return cut.tokens, max(1, n), max(1, k), 1.0
