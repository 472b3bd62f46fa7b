"""When one rank did what in a step: actions, collectives and messages, as spans, and the memory it held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

COMPUTE, WAIT = "compute", "wait"
"""Streams: what is computed, and for whom that waits."""


class Span(NamedTuple):
    """stream: what runs one thing at a time; kind: of action, with its stage and microbatch, or another word."""

    stream: str
    kind: str
    stage: int | None
    microbatch: int | None
    start_s: float
    stop_s: float


class Held(NamedTuple):
    """bytes that were held from time_s on."""

    time_s: float
    bytes: int


Moment = float | torch.cuda.Event


class _Marked(NamedTuple):
    """A span whose times are not read yet."""

    stream: str
    kind: str
    stage: int | None
    microbatch: int | None
    start: Moment
    stop: Moment


class Recorder:
    """Times count from `start`, which every rank is to call at the same moment, such as after a barrier.

    On CUDA a time is that of the device: when the stream that computes came to the place. held_bytes: what is held now,
    where that is known.
    """

    def __init__(self, device: torch.device, held_bytes: Callable[[], int] | None):
        self._cuda = device.type == "cuda"
        self._held_bytes = held_bytes
        self._spans: list[_Marked] = []
        self._held: list[tuple[Moment, int]] = []
        self._start = self._now()

    def start(self) -> None:
        self._start = self._now()

    def elapsed_s(self) -> float:
        """Seconds since the start; on CUDA until the device has done what it was given so far."""
        return self._seconds(self._now())

    @contextmanager
    def span(self, stream: str, kind: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """What happens within is one span."""
        done = self.begin(stream, kind, stage, microbatch)
        yield
        done()

    def begin(
        self, stream: str, kind: str, stage: int | None = None, microbatch: int | None = None
    ) -> Callable[[], None]:
        """A span begins; it ends when what is returned is called."""
        start = self._now()

        def done() -> None:
            stop = self._now()
            self._spans.append(_Marked(stream, kind, stage, microbatch, start, stop))
            if stream == COMPUTE and self._held_bytes is not None:
                self._held.append((stop, self._held_bytes()))

        return done

    def spans(self) -> list[Span]:
        return [
            Span(m.stream, m.kind, m.stage, m.microbatch, self._seconds(m.start), self._seconds(m.stop))
            for m in self._spans
        ]

    def held(self) -> list[Held]:
        return [Held(self._seconds(at), size) for at, size in self._held]

    def _now(self) -> Moment:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            assert isinstance(self._start, float)
            return moment - self._start
        moment.synchronize()
        return float(self._start.elapsed_time(moment)) / 1e3  # type: ignore[union-attr]
