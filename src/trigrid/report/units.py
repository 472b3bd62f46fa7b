"""Numbers as a person reads them."""

from __future__ import annotations

from trigrid.spec.gpu import GIB


def gib(amount: float) -> str:
    """Bytes in GiB, one decimal."""
    return f"{amount / GIB:,.1f}"


def size(n: int) -> str:
    """Bytes in the largest unit that leaves at least one before the point."""
    power, unit = next((p, u) for p, u in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")) if n >= 2**p or not p)
    return f"{n / 2**power:,.3f} {unit}" if power else f"{n} B"


def seconds(value: float) -> str:
    """Three figures, in s or ms."""
    if value >= 0.9995:
        return f"{figures(value)} s"
    return f"{figures(value * 1e3)} ms"


def figures(value: float) -> str:
    """At least three figures, never with an exponent."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def rate(flops_per_s: float) -> str:
    """FLOP/s with three figures."""
    factor, unit = (1e12, "TFLOP/s") if flops_per_s >= 0.9995e12 else (1e9, "GFLOP/s")
    return f"{figures(flops_per_s / factor)} {unit}"


def scaled(value: float) -> str:
    """A count with K, M, B or T."""
    for suffix, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}"


def days(value: float) -> str:
    """A duration that may be years, in days or hours."""
    return f"{value / 86400:,.1f} days" if value >= 86400 else f"{value / 3600:.1f} hours"
