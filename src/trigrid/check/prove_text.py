"""Proofs for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from trigrid.check.prove import NEAR, SMALL, Line, Peak, Proof
from trigrid.ledger import STATE
from trigrid.report.console import table
from trigrid.report.units import size

MOST_HOLDINGS = 6
DIFFERS = "DIFFERS"
HELD = "predicted = traced in state, traffic and operations, and near it at the peak"


def proofs_text(proofs: Sequence[Proof]) -> str:
    """A page for each proof, and the outcome of all."""
    pages = [_page(proof) for proof in proofs]
    if len(proofs) > 1:
        broken = [f"{proof.rank:,}" for proof in proofs if not proof.holds]
        pages.append(f"DIFFERS on rank {', '.join(broken)}" if broken else "predicted = traced on every rank shown")
    return "\n\n\n".join(pages)


def proofs_json(proofs: Sequence[Proof]) -> dict[str, object]:
    return {"world": proofs[0].world, "holds": all(p.holds for p in proofs), "ranks": [_as_json(p) for p in proofs]}


def _as_json(proof: Proof) -> dict[str, object]:
    peak = asdict(proof.peak)
    peak["holdings"] = [holding._asdict() for holding in proof.peak.holdings]
    samples = [{"action": str(s.action), "peak": dict(s.peak.bytes), "left": dict(s.left.bytes)} for s in proof.samples]
    return {**asdict(proof), "peak": peak, "samples": samples, "holds": proof.holds}


def _page(proof: Proof) -> str:
    also = f"; stands for pipeline ranks {proof.alike}" if proof.alike != str(proof.pp) else ""
    kept = f"still alive after being given up: {', '.join(proof.survivors)}" if proof.survivors else ""
    left = ", ".join(f"{name} {size(n)}" for name, n in proof.left_over.items())
    blocks = [
        f"rank {proof.rank} of {proof.world}: {proof.role}{also}",
        _state(proof),
        _peak(proof.peak),
        _traffic(proof),
        _flops(proof),
        kept,
        f"still alive after the step: {left}" if left else "",
        f"{HELD if proof.holds else 'predicted and traced DIFFER'}; peak {proof.peak.total.off:+.1%}, "
        f"at most ± {NEAR:.0%} ({proof.cpu_s:.1f} CPU-s, {size(proof.host_bytes)} of this host)",
    ]
    return "\n\n".join(block for block in blocks if block)


def _state(proof: Proof) -> str:
    rows = [
        [line.name, *map(size, (line.predicted, line.traced, proof.peak_state.get(line.name, 0))), _mark(line)]
        for line in proof.state
    ]
    total = [sum(getattr(line, side) for line in proof.state) for side in ("predicted", "traced")]
    rows.append(["total", *map(size, total), "", ""])
    return table(["state", "predicted", "traced", "peak in step", ""], rows)


def _peak(peak: Peak) -> str:
    """State that is open, such as weights that ZeRO-3 has gathered, is among the transients on both sides."""
    limit = SMALL * peak.total.traced
    lines = [line for line in peak.memory if line.predicted or line.traced]
    rows = [[line.name, size(line.predicted), size(line.traced), *_distance(line, limit)] for line in lines]
    rows.append(["peak", size(peak.total.predicted), size(peak.total.traced), *_distance(peak.total, 0)])
    moving = [holding for holding in peak.holdings if holding.category not in STATE][:MOST_HOLDINGS]
    alive = [[f"  {h.category}", h.unit or "–", _operation(h.made_by), f"{h.number:,}", size(h.bytes)] for h in moving]
    unit = f", in {peak.unit}" if peak.unit else ""
    parts = ", ".join(f"{name} {size(n)}" for name, n in sorted(peak.parts.items(), key=lambda part: -part[1]))
    text = table([f"memory at {peak.action}{unit}", "predicted", "traced", "off", ""], rows)
    text += f"\nplanned moment: {peak.planned}" + (f"; transients are {parts}" if parts else "")
    return f"{text}\n{table(['largest alive', 'unit', 'made by', 'number', 'bytes'], alive)}" if alive else text


def _traffic(proof: Proof) -> str:
    rows = [
        [
            calls.name,
            f"{calls.predicted:,}",
            f"{calls.traced:,}",
            size(payload.predicted),
            size(payload.traced),
            _mark(calls) or _mark(payload),
        ]
        for calls, payload in zip(proof.calls, proof.payload, strict=True)
    ]
    return table(["traffic of a step", "calls", "traced", "payload", "traced", ""], rows)


def _flops(proof: Proof) -> str:
    rows = [[line.name, flops(line.predicted), flops(line.traced), _mark(line)] for line in proof.flops]
    return table(["operations of a step", "predicted", "traced", ""], rows)


def _distance(line: Line, limit: float) -> list[str]:
    apart = abs(line.predicted - line.traced)
    off = f"{line.off:+.1%}" if apart and line.predicted else ""
    return [off, DIFFERS if not line.near and apart > limit else ""]


def _operation(made_by: str) -> str:
    return made_by.removeprefix("aten.").partition(".")[0]


def flops(n: int) -> str:
    power, unit = next((p, u) for p, u in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (0, "")) if n >= 10**p or not p)
    return f"{n / 10**power:,.3f} {unit}FLOP"


def _mark(line: Line) -> str:
    return "" if line.equal else DIFFERS
