"""A named schedule of many microbatches replayed by its beginning and its end.

Between filling and draining, every rank repeats what it did for the p microbatches before. A replay is a longest path
(Baccelli 1992, "Synchronization and Linearity"): where a stretch of it that is longer than any wait reaches back takes
place the same time later than the stretch one round before, all later rounds do, and so does the end. A smaller
schedule in which such a stretch is seen therefore tells the end of the larger one.
"""

from __future__ import annotations

from functools import lru_cache

from trigrid.schedule.generators import make_schedule
from trigrid.schedule.replay import Durations, Order, order_of

REACH = 3
"""Rounds of p microbatches by which an action may be ahead of one that it waits for, at most: what is in flight."""
ROUNDS = (12, 24, 48, 96)
"""Of the smaller schedules that are tried."""
DRIFT = 1e-11
"""Share of the end by which what repeats may differ from round to round, over all rounds that are left out."""


@lru_cache(maxsize=64)
def order_for(name: str, pp: int, microbatches: int, virtual: int) -> Order:
    """An order in which the schedule can be played, made once."""
    return order_of(make_schedule(name, pp, microbatches, virtual))


def end_s(name: str, pp: int, microbatches: int, virtual: int, durations: Durations) -> float:
    """When the last action of a named schedule ends: `replay`'s step_s, up to rounding."""
    for rounds in ROUNDS:
        fewer = rounds * pp + microbatches % pp
        if name == "gpipe" or 4 * fewer > 3 * microbatches:
            break
        order = order_for(name, pp, fewer, virtual)
        left_out = (microbatches - fewer) // pp
        end, round_s, drift = _last_rounds(order, pp, durations)
        if drift * left_out <= DRIFT * end:
            return end + left_out * round_s
    order = order_for(name, pp, microbatches, virtual)
    return max(order.times(order.seconds(durations), order.delays(durations))[0])


def _last_rounds(order: Order, pp: int, durations: Durations) -> tuple[float, float, float]:
    """(end, seconds of a round, most by which an action's round differs from it), of the last rounds before the
    pipeline drains."""
    ends, arrivals = order.times(order.seconds(durations), order.delays(durations))
    until = order.schedule.microbatches - REACH * pp
    since = until - (REACH + 1) * pp
    known: dict[tuple[int, int], int] = {}
    least, most = float("inf"), 0.0
    for entry, (action, cost) in enumerate(zip(order.actions, order.costs, strict=True)):
        microbatch = action.microbatch
        if not since <= microbatch < until:
            continue
        known[cost, microbatch] = entry
        before = known.get((cost, microbatch - pp))
        if before is not None:
            for times in (ends, arrivals):
                later = times[entry] - times[before]
                least, most = min(least, later), max(most, later)
    return max(ends), most, most - least
