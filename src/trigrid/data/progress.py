"""How long work says that it is alive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from threading import Event
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called with a stage in words, the amount done and the total, in the stage's own unit; a total of 0 is not known."""

TICK_S = 0.5


class Stopped(Exception):
    """Raised by work that notices that nobody waits for it any more."""


def watch(work: Callable[[], T], tick: Callable[[], None], stop: Event) -> T:
    """The result of `work`, run in a second thread, while the caller's thread calls `tick` every half second.

    Errors of `work` are raised here. An error in the caller's thread, such as Ctrl-C, sets `stop` and waits for `work`
    to notice.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(work)
        try:
            while wait_for([future], timeout=TICK_S).not_done:
                tick()
        except BaseException:
            stop.set()
            raise
        return future.result()
