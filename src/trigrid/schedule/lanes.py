"""One schedule played thousands of times at once, with other speeds of ranks and links each time.

A whole number of Python holds one value of each play, 64 bits apart: a *lane* each. Sums of such numbers are sums of
all lanes. The larger of two values is taken in all lanes at once with the highest bit of each, which no value uses: set
in one number before the other is subtracted, it stays where the first was not smaller. This is some ten times as fast
as playing one after the other, and needs no library.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence

from trigrid.schedule.replay import Order

FACTOR_BITS = 24
"""Factors are whole numbers of 2**-24."""
LEAST_S = 1e-200
"""A step that takes less takes no time: ticks of it would be too many for a float."""
LANES = 1024
"""Played in one go: their numbers just fit the fastest cache."""


def fixed(factor: float) -> int:
    """`factor` as a lane holds it."""
    return round(factor * (1 << FACTOR_BITS))


def play_lanes(
    order: Order,
    seconds: Sequence[float],
    delays: Sequence[float],
    factors: Sequence[array[int]],
    link_factors: Mapping[int, array[int]],
) -> list[float]:
    """The end of the step in each lane, where an action takes its `seconds` times the factor of its rank, and a
    message its delay times that of its link.

    factors: by rank, of each lane, array("Q") of `fixed` factors; link_factors: by link, likewise; others have 1.
    Times are rounded to one part in 2**38 of the longest step, before they are multiplied with the factors.
    """
    count = len(factors[0])
    found: list[float] = []
    largest = max(max(map(max, factors)), *map(max, link_factors.values()), fixed(1.0))
    # A step is no longer than that of ranks and links that are all as slow as the slowest.
    longest_s = order.play(seconds, delays).step_s * largest / 2**FACTOR_BITS * (1 + 1e-6)
    ticks = 2**62 / 2**FACTOR_BITS / longest_s if longest_s > LEAST_S else 0.0
    for first in range(0, count, LANES):
        block = slice(first, first + LANES)
        ends = _block(
            order,
            [round(took * ticks) for took in seconds],
            [round(delay * ticks) for delay in delays],
            [values[block] for values in factors],
            {link: values[block] for link, values in link_factors.items()},
        )
        found += [end / (ticks * 2**FACTOR_BITS) if ticks else 0.0 for end in ends]
    return found


def _block(
    order: Order,
    costs: Sequence[int],
    delays: Sequence[int],
    factors: Sequence[array[int]],
    link_factors: Mapping[int, array[int]],
) -> array[int]:
    lanes = len(factors[0])
    ones = _packed(array("Q", [1]) * lanes)
    top = ones << 63
    speeds = [_packed(values) for values in factors]
    links = [ones << FACTOR_BITS] * (max(order.links, default=-1) + 1)
    for link, values in link_factors.items():
        links[link] = _packed(values)
    free = [0] * len(factors)
    free_links = [0] * len(links)
    arrivals = [0] * len(costs)
    # A message without a delay of its own still waits for those before it.
    delayed = {link for link, delay in zip(order.links, delays, strict=True) if delay}
    products: dict[tuple[int, int], int] = {}
    for i, (rank, needed, link) in enumerate(zip(order.ranks, order.awaits, order.links, strict=True)):
        took = products.get((rank, costs[i]))
        if took is None:
            took = products[rank, costs[i]] = speeds[rank] * costs[i]
        start = free[rank]
        # A result of the rank's own is there already.
        if needed >= 0 and order.ranks[needed] != rank:
            start = _larger(start, arrivals[needed], top)
            arrivals[needed] = 0
        free[rank] = end = start + took
        if link >= 0:
            if link in delayed:
                free_links[link] = end = _larger(end, free_links[link], top) + links[link] * delays[i]
            arrivals[i] = end
    end = 0
    for last in free:
        end = _larger(end, last, top)
    values = array("Q")
    values.frombytes(end.to_bytes(8 * lanes, sys.byteorder))
    # The first lane is the lowest.
    return values if sys.byteorder == "little" else values[::-1]


def _packed(values: array[int]) -> int:
    if sys.byteorder == "big":
        values = values[::-1]
    return int.from_bytes(values.tobytes(), sys.byteorder)


def _larger(a: int, b: int, top: int) -> int:
    """Of each lane the larger value; top: the highest bit of each lane."""
    difference = (a | top) - b
    kept = difference & top
    return b + (difference & (kept - (kept >> 63)))
