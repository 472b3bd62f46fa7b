"""Timing of one call on all ranks at once, within a budget of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from trigrid.engine.comm import Comm

T = TypeVar("T", bound=Hashable)
Progress = Callable[[str, int, int], None]
Result = Tensor | tuple[Tensor, ...]

REPEATS, FEWEST = 5, 2
MOST_CALLS = 1000
LEAST_POINTS = 3


def ends_first(items: Sequence[T]) -> list[T]:
    """The first, the last and the middle one before all others, should time run out."""
    middle = len(items) // 2
    return list(dict.fromkeys([items[0], items[-1], items[middle], *items]))


class Meter:
    """Times calls on `device`. What one rank takes, all wait for: a time is that of the slowest, the same on every
    rank, so that all decide alike. progress: told of (phase, done, total)."""

    def __init__(self, device: torch.device, comm: Comm | None, progress: Progress):
        self.device, self.comm, self.progress = device, comm, progress

    def agree(self, seconds: float) -> float:
        """The largest of all ranks' values."""
        if self.comm is None or self.comm.group("world").size == 1:
            return seconds
        tensor = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        return self.comm.read(self.comm.all_reduce(tensor, "world", "max"))[0]

    def seconds(self, call: Callable[[], object], within_s: float) -> float:
        """What one `call` takes: the median of a few runs of several calls, after one that warms up; about `within_s`
        in all, or a few calls where these take longer."""
        return self.agree(self.own(call, within_s))

    def own(self, call: Callable[[], object], within_s: float) -> float:
        """As `seconds`, of this rank alone, while all others are at it."""
        once = self.agree(self._run(call, 1))
        if once < within_s / REPEATS:
            # The first call may have made more than it will again.
            once = self.agree(self._run(call, 1))
        affordable = within_s / max(once, 1e-7)
        calls = int(min(MOST_CALLS, max(1.0, affordable / REPEATS)))
        repeats = int(min(REPEATS, max(FEWEST, affordable)))
        # Ranks begin together: agreeing has just made them meet.
        return median(self._run(call, calls) / calls for _ in range(repeats))

    def both_ways(self, call: Callable[[], Result], inputs: Sequence[Tensor], within_s: float) -> tuple[float, float]:
        """Seconds of `call` and of the backward of what it gives, down to `inputs`; within_s: for both."""
        given = call()
        gradients = [torch.randn_like(x) for x in (given if isinstance(given, tuple) else (given,))]
        forward = self.seconds(call, within_s / 3)
        together = self.seconds(lambda: torch.autograd.grad(call(), inputs, gradients), within_s * 2 / 3)
        return forward, max(together - forward, forward / 10)

    def _run(self, call: Callable[[], object], calls: int) -> float:
        self._synchronise()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        self._synchronise()
        return time.perf_counter() - begun

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def within(self, phase: str, items: Iterable[T], seconds: float) -> Iterator[tuple[T, float]]:
        """Each item with the seconds that its measurement may take, until `seconds` are over; at least a few."""
        todo = list(items)
        begun = time.perf_counter()
        for done, item in enumerate(todo):
            self.progress(phase, done, len(todo))
            left = seconds - self.agree(time.perf_counter() - begun)
            if left <= 0 and done >= LEAST_POINTS:
                break
            yield item, max(0.001, left / (len(todo) - done))
        self.progress(phase, len(todo), len(todo))
