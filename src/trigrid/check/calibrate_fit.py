"""Closed forms of plan/measured.py from points, by least squares of relative distances with no negative parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median

from trigrid.plan.compute import narrowness
from trigrid.plan.measured import Attention, Passes, Points, Products, Wire, WireKind, ring_terms
from trigrid.spec.cluster import Tier

# A rate that is not seen in the points because something else takes all the time.
UNSEEN = 1e-30


def least_squares(rows: Sequence[Sequence[float]], needed: int = 0) -> list[float]:
    """The x, none negative and x[needed] above 0, for which Σ (row · x − 1)² is least.

    Every subset of few unknowns is solved by itself: what is zero in the best of them is not needed.
    """
    count = len(rows[0])
    best: tuple[float, list[float]] | None = None
    for size in range(1, min(count, len(rows)) + 1):
        for chosen in combinations(range(count), size):
            if needed not in chosen:
                continue
            found = _solve([[row[column] for column in chosen] for row in rows])
            if found is None or min(found) < 0 or found[chosen.index(needed)] <= 0:
                continue
            x = [0.0] * count
            for column, value in zip(chosen, found, strict=True):
                x[column] = value
            distance = sum((sum(a * b for a, b in zip(row, x, strict=True)) - 1) ** 2 for row in rows)
            # More parameters for the same distance explain nothing.
            if best is None or distance < best[0] * (1 - 1e-9):
                best = distance, x
    if best is None:
        # Any one row gives the rate alone.
        x = [0.0] * count
        x[needed] = 1 / median(row[needed] for row in rows)
        return x
    return best[1]


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The x for which Σ (row · x − 1)² is least; None where the rows do not tell its parts apart."""
    count = len(rows[0])
    # Columns of like size: they differ by the square of what is measured.
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(count)]
    scaled = [[row[i] / scale[i] for i in range(count)] for row in rows]
    matrix = [[sum(row[i] * row[j] for row in scaled) for j in range(count)] for i in range(count)]
    vector = [sum(row[i] for row in scaled) for i in range(count)]
    for i in range(count):
        pivot = max(range(i, count), key=lambda r: abs(matrix[r][i]))
        if abs(matrix[pivot][i]) < 1e-12 * len(rows):
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        vector[i], vector[pivot] = vector[pivot], vector[i]
        for r in range(i + 1, count):
            factor = matrix[r][i] / matrix[i][i]
            matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[i], strict=True)]
            vector[r] -= factor * vector[i]
    x = [0.0] * count
    for i in reversed(range(count)):
        x[i] = (vector[i] - sum(matrix[i][j] * x[j] for j in range(i + 1, count))) / matrix[i][i]
    return [value / scale[i] for i, value in enumerate(x)]


def _error(points: Points, seconds: Callable[[tuple[float, ...]], float]) -> float:
    """The median distance of the points, whose last number is seconds, from the form."""
    return median(abs(seconds(point) / point[-1] - 1) for point in points)


def fit_products(points: Points) -> Products:
    """points: (m, n, k, seconds)."""
    rows = [[2 * x / s for x in (m * n * k, n * k, m * k, m * n)] for m, n, k, s in points]
    x = least_squares(rows)
    fitted = Products(1 / x[0], x[1] / x[0], x[2] / x[0], x[3] / x[0], 0.0, points)
    error = _error(points, lambda p: fitted.form(p[0], p[1], p[2]))
    return Products(fitted.flops, fitted.half_m, fitted.half_n, fitted.half_k, error, points)


def fit_attention(points: Points) -> Attention:
    """points: (batch, heads, sequence, head_dim, seconds of forward, of backward)."""

    def work(point: tuple[float, ...]) -> float:
        batch, heads, sequence, head_dim = point[:4]
        return 2 * batch * heads * sequence**2 * head_dim / narrowness(head_dim)

    rows = [[work(p) / p[4], work(p) / p[2] / p[4]] for p in points]
    x = least_squares(rows)
    flops, half = 1 / x[0], x[1] / x[0]
    error = median(abs(work(p) / flops * (1 + half / p[2]) / p[4] - 1) for p in points)
    return Attention(flops, half, median(p[5] / p[4] for p in points), error, points)


def fit_passes(points: Points) -> Passes:
    """points: (bytes, seconds); the largest are beyond every cache."""
    far = tuple(point for point in points if point[0] >= max(size for size, _ in points) / 4)
    rate = median(size / seconds for size, seconds in far)
    return Passes(rate, _error(far, lambda p: p[0] / rate), tuple(sorted(points)))


def fit_wire(kind: WireKind, tier: Tier, ranks: int, inside: int, points: Points) -> Wire:
    """points: (bytes, seconds)."""
    hops, share = ring_terms(kind, ranks, inside)
    per_byte, hop_s = least_squares([[share * size / seconds, hops / seconds] for size, seconds in points])
    per_byte = max(per_byte, UNSEEN)
    wire = Wire(kind, tier, ranks, inside, hop_s, 1 / per_byte, 0.0, points)
    error = _error(points, lambda p: wire.form(kind, p[0], ranks, inside))
    return Wire(kind, tier, ranks, inside, hop_s, 1 / per_byte, error, points)
