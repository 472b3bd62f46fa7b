"""How long work says that it is alive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called with a stage in words, the amount done and the total, in the stage's own unit; a total of 0 is not known."""

TICK_S = 0.5


def watch(work: Callable[[], T], tick: Callable[[], None]) -> T:
    """The result of `work`, run in a second thread, while the caller's thread calls `tick` every half second.

    For one call into a library that says nothing and gives up the interpreter's lock. Errors of `work` are raised here.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(work)
        while wait_for([future], timeout=TICK_S).not_done:
            tick()
        return future.result()
