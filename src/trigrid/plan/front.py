"""Memory against time: for less and less memory, the fastest layout that needs no more.

A search tells the Pareto front of what is about as fast as its best; each search here is another one with a lower
ceiling (the ε-constraint method, Haimes, Lasdon and Wismer 1971), so that its layout is the fastest of all within it.
"""

from __future__ import annotations

from collections.abc import Iterator

from trigrid.plan.found import Candidate, Found
from trigrid.plan.search import REPLAYED, Searcher
from trigrid.plan.software import Software
from trigrid.plan.space import Space

LESS = 0.85
"""Of the memory of one layout of a front that the next may need."""
SLOWEST = 2.0
"""Times as long as the best that a layout of a front may take."""


def fastest(
    space: Space, software: Software, hbm_bytes: float | None = None, slowest_s: float = float("inf")
) -> Candidate | None:
    """The fastest layout of `space` that needs at most `hbm_bytes`, by default what a GPU has, and takes at most
    `slowest_s`; None where none does."""
    if not space.grids:
        return None
    searcher = Searcher(space, software, hbm_bytes)
    if searcher.tightest().bytes > searcher.ceiling:
        return None
    # As if a layout that takes so long were known: what cannot be faster is not looked at.
    searcher.best = slowest_s
    found = next(iter(searcher.run(REPLAYED, slack=1.0).ranked), None)
    return found if found and found.step_s <= slowest_s else None


def smaller(space: Space, software: Software, than_bytes: float, best_s: float) -> Candidate | None:
    """The fastest layout that needs clearly less than `than_bytes` and is not much slower than the best (`best_s`)."""
    return fastest(space, software, LESS * than_bytes, SLOWEST * best_s)


def front(found: Found) -> Iterator[Candidate]:
    """The best layout that was found, and for less and less memory the fastest: each needs at most LESS of the memory
    of the one before, and takes at most SLOWEST times as long as the best."""
    last = found.chosen if found.ranked else None
    while last is not None:
        yield last
        last = smaller(found.space, found.software, last.bytes, found.chosen.step_s)
