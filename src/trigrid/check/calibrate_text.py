"""A calibration for people: what is fast, what is slow, and how far the closed forms are from the points."""

from __future__ import annotations

from collections.abc import Iterator

from trigrid.plan.measured import Measured
from trigrid.report.console import table
from trigrid.report.units import figures


def calibration_text(measured: Measured) -> str:
    """One line for each form that was fitted."""
    header = ("measured", "rate", "at half of it", "latency", "points", "fit off by")
    return "\n".join([measured.told, "", table(header, list(_rows(measured)))])


def _rows(measured: Measured) -> Iterator[tuple[str, ...]]:
    for name, fitted in measured.products.items():
        halves = f"m {fitted.half_m:,.0f}, n {fitted.half_n:,.0f}, k {fitted.half_k:,.0f}"
        yield f"products, {name}", _flops(fitted.flops), halves, "", str(len(fitted.points)), f"{fitted.error:.0%}"
    for name, attention in measured.attention.items():
        half = f"sequence {attention.half_sequence:,.0f}"
        rate = _flops(attention.flops)
        yield f"attention, {name}", rate, half, "", str(len(attention.points)), f"{attention.error:.0%}"
    if measured.passes:
        passes = measured.passes
        yield "memory", _bandwidth(passes.Bps), "", "", str(len(passes.points)), f"{passes.error:.0%}"
    for name, operations in measured.operations.items():
        for which, operation in operations.items():
            size, seconds = operation.forward[-1]
            back = f"backward × {operation.backward[-1][1] / seconds:.1f}"
            yield f"{which}, {name}", _bandwidth(size / seconds), back, "", str(len(operation.forward)), ""
    if measured.launch:
        yield "a kernel's launch", "", "", _micro(measured.launch.seconds), "", ""
    for wire in measured.wires:
        what = f"{wire.kind}, {wire.ranks} ranks, {wire.tier.name.lower()}"
        rate, hop = _bandwidth(wire.link_Bps), f"{_micro(wire.hop_s)} a hop"
        yield what, rate, "", hop, str(len(wire.points)), f"{wire.error:.0%}"


def _flops(rate: float) -> str:
    return f"{figures(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{figures(rate / 1e9)} GFLOP/s"


def _bandwidth(rate: float) -> str:
    return f"{figures(rate / 1e9)} GB/s"


def _micro(seconds: float) -> str:
    return f"{figures(seconds * 1e6)} µs"
