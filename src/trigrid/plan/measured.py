"""What was measured on a cluster, and the closed forms by which it prices what was not.

Each form has few parameters, fitted by least squares to the points beside it; `error` is the median distance of the
points from it, as a share. A product whose very shape is among the points takes what was measured, and so does a
transfer of a kind and a group whose points are of smaller and of larger ones, in the ratio of the sizes.
    product      2·m·n·k ÷ flops · (1 + half_m ÷ m + half_n ÷ n + half_k ÷ k)
    attention    causal half of the operations ÷ flops · (1 + half_sequence ÷ sequence); backward a multiple of it
    memory       bytes read and written ÷ Bps, or the rate of as many bytes where points have it
    operation    of so many bytes read and written: between its points in the ratio of the sizes, as at the smallest
                 below it, in proportion beyond the largest
    ring         rounds · ((n − 1) · hop_s + bytes · (n − 1) ÷ (n · inside) ÷ link_Bps): rounds are 2 for an
                 all-reduce, 1 for an all-gather and a reduce-scatter; inside: ranks of the group in one node, each with
                 its own NIC, where it crosses nodes, else 1
    exchange     hop_s + bytes · (n − inside) ÷ n ÷ link_Bps, or · (n − 1) ÷ n inside a node
    message      hop_s + bytes ÷ link_Bps
Bytes of a collective are those of the whole array: what an all-gather yields, what a reduce-scatter takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import Literal, get_args

from trigrid.spec.cluster import Tier
from trigrid.spec.gpu import Gpu

WireKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"]
KINDS: tuple[WireKind, ...] = get_args(WireKind)
# Ring collectives stand in for each other, the likest first.
STAND_INS: Mapping[WireKind, tuple[WireKind, ...]] = {
    "all_reduce": ("all_reduce", "reduce_scatter", "all_gather"),
    "all_gather": ("all_gather", "reduce_scatter", "all_reduce"),
    "reduce_scatter": ("reduce_scatter", "all_gather", "all_reduce"),
    "all_to_all": ("all_to_all",),
    "message": ("message",),
}
NUMBER_FORMATS = ("bf16", "fp16", "fp32", "fp8")
# Those of the engine that are measured by themselves, see `Pass.operation`.
OPERATIONS = ("norm", "rotary", "gated", "gelu", "loss")

Points = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Products:
    """Matrix products, m × k by k × n; one of a measured shape takes what was measured. points: (m, n, k, seconds)."""

    flops: float
    half_m: float
    half_n: float
    half_k: float
    error: float
    points: Points = ()

    def seconds(self, m: float, n: float, k: float) -> float:
        known = [point[3] for point in self.points if point[:3] == (m, n, k)]
        return known[0] if known else self.form(m, n, k)

    def form(self, m: float, n: float, k: float) -> float:
        """By the closed form alone."""
        return 2 * m * n * k / self.flops * (1 + self.half_m / m + self.half_n / n + self.half_k / k)


@dataclass(frozen=True)
class Attention:
    """Fused causal attention. backward: its time over that of forward. points: (batch, heads, sequence, head_dim,
    seconds of forward, of backward)."""

    flops: float
    half_sequence: float
    backward: float
    error: float
    points: Points = ()


@dataclass(frozen=True)
class Passes:
    """Memory-bound operations; Bps: beyond every cache. points: (bytes, seconds), by size."""

    Bps: float
    error: float
    points: Points = ()

    def rate(self, size: float) -> float:
        """Bytes a second of one that moves `size` bytes: between the points in the ratio of the sizes, as at the first
        below it, Bps beyond the last."""
        known = tuple((there, there / seconds) for there, seconds in self.points)
        if not known or size >= known[-1][0]:
            return self.Bps
        return known[0][1] if size <= known[0][0] else _between(known, size)


@dataclass(frozen=True)
class Operation:
    """What the engine computes element by element, which a CPU's arithmetic may bound. forward, backward: (bytes that
    the blueprint claims, seconds) by size, at least one each; all that the host does for it is in them."""

    forward: Points
    backward: Points

    def seconds(self, size: float, *, backward: bool) -> float:
        points = self.backward if backward else self.forward
        if size <= points[0][0]:
            return points[0][1]
        if size >= points[-1][0]:
            return points[-1][1] * size / points[-1][0]
        return _between(points, size)


def _between(points: Points, size: float) -> float:
    """The second number at `size`, a first one within those of `points`, in the ratio of the sizes."""
    place = next(i for i, (there, _) in enumerate(points) if there > size)
    (low, at_low), (high, at_high) = points[place - 1 : place + 1]
    between: float = at_low * (at_high / at_low) ** (log(size / low) / log(high / low))
    return between


@dataclass(frozen=True)
class Launch:
    """What the host needs to start a kernel. blocking: it does nothing else meanwhile, nor is anything else done."""

    seconds: float
    blocking: bool


@dataclass(frozen=True)
class Wire:
    """Transfers of one kind among `ranks` ranks, `inside` of them in a node (1 inside a node), that cross `tier` at the
    farthest. points: (bytes, seconds)."""

    kind: WireKind
    tier: Tier
    ranks: int
    inside: int
    hop_s: float
    link_Bps: float
    error: float
    points: Points = ()

    def seconds(self, kind: WireKind, payload_bytes: float, ranks: int, inside: int) -> float:
        """What a transfer of `kind` takes over this wire, were there `ranks` ranks: between its points where it is such
        a wire, since libraries change their ways with the size, else by the closed form."""
        alike = (kind, ranks, inside) == (self.kind, self.ranks, self.inside)
        if alike and self.points and self.points[0][0] <= payload_bytes < self.points[-1][0]:
            return _between(self.points, payload_bytes)
        return self.form(kind, payload_bytes, ranks, inside)

    def form(self, kind: WireKind, payload_bytes: float, ranks: int, inside: int) -> float:
        """By the closed form alone."""
        hops, share = ring_terms(kind, ranks, inside)
        return hops * self.hop_s + payload_bytes * share / self.link_Bps


def ring_terms(kind: WireKind, ranks: int, inside: int) -> tuple[float, float]:
    """How many hops a transfer makes, and what share of its bytes the busiest link carries."""
    if kind == "message":
        return 1.0, 1.0
    if kind == "all_to_all":
        return 1.0, (ranks - inside) / ranks
    rounds = 2 if kind == "all_reduce" else 1
    return float(rounds * (ranks - 1)), rounds * (ranks - 1) / (ranks * inside)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A calibration: what is None or missing was not measured, and is as the catalogue and the constants say.

    about: who measured what, where and when, as it is told. presumed: fields of the accelerator that nobody measured.
    operations: by number format and name, one of OPERATIONS. values: constants by name that hold here instead of
    those that ship.
    """

    path: str = ""
    about: Mapping[str, str | int | float] = field(default_factory=dict)
    gpus_per_node: int | None = None
    accelerator: Gpu | None = None
    presumed: tuple[str, ...] = ()
    products: Mapping[str, Products] = field(default_factory=dict)
    attention: Mapping[str, Attention] = field(default_factory=dict)
    passes: Passes | None = None
    operations: Mapping[str, Mapping[str, Operation]] = field(default_factory=dict)
    launch: Launch | None = None
    wires: tuple[Wire, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, kind: WireKind, payload_bytes: float, ranks: int, inside: int, tier: Tier) -> float | None:
        """What a transfer takes, by the wire of its tier that is the likest; None where none was measured."""
        for stand_in in STAND_INS[kind]:
            wires = [wire for wire in self.wires if wire.kind == stand_in and wire.tier == tier]
            if wires:
                near = min(wires, key=lambda w: (abs(log(w.ranks / ranks)), abs(log(w.inside / inside))))
                return near.seconds(kind, payload_bytes, ranks, inside)
        return None

    @property
    def told(self) -> str:
        """When and where it was measured, in one line."""
        about = self.about
        words = [str(about[key]) for key in ("date", "host", "accelerator") if about.get(key)]
        if about.get("ranks"):
            words.append(f"{about['ranks']} ranks")
        words += [f"{key} {about[key]}" for key in ("backend", "torch") if about.get(key)]
        return f"calibrated by {self.path}: {', '.join(words)}" if words else f"calibrated by {self.path}"
