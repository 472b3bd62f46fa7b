"""Where a run goes next: the samples of each step, what is passed over, and what counts as a spike of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev

Span = tuple[int, int]
"""Samples start..stop, counted from the start of training."""


def places(consumed: int, global_batch: int, skipped: Sequence[Span]) -> Iterator[int]:
    """The first sample of each following step, after `consumed` samples, without those of `skipped`, which are in
    order and do not overlap. Batches are whole: what is left before a skipped range is passed over, too."""
    while True:
        for start, stop in skipped:
            if consumed < stop and start < consumed + global_batch:
                consumed = stop
        yield consumed
        consumed += global_batch


def merged(skipped: Sequence[Span], more: Span) -> tuple[Span, ...]:
    """`skipped` and `more` in order, with neighbours and overlaps as one."""
    spans: list[Span] = []
    for start, stop in sorted([*skipped, more]):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return tuple(spans)


def is_spike(loss: float, recent: Sequence[float], window: int, sigmas: float) -> bool:
    """Whether `loss` is more than `sigmas` standard deviations above the mean of the last `window` losses; never before
    there are so many."""
    if len(recent) < window or not math.isfinite(loss):
        return False
    return loss > fmean(recent) + sigmas * pstdev(recent)
