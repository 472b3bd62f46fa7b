"""The lives of a run: the lines of its events and metrics, cut at each start of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

US = 1_000_000
"""Microseconds in a second."""
TOLD = ("start", "step", "validation")
"""Kinds of lines of metrics that tell of time."""


@dataclass(frozen=True)
class Line:
    """A line of either file. us: its Unix time in microseconds, not before that of the line above it."""

    us: int
    kind: str
    metric: bool
    values: Mapping[str, Any]

    def number(self, name: str) -> float:
        """A value, 0 where it is none."""
        value = self.values.get(name)
        return value if isinstance(value, int | float) else 0

    def micros(self, name: str) -> int:
        return max(0, round(self.number(name) * US))

    @property
    def told_us(self) -> int:
        """As it was written."""
        return self.micros("time_s")

    @property
    def step(self) -> int:
        return int(self.number("step"))


@dataclass(frozen=True)
class Life:
    """One start of the ranks, to the next one's, or for the last to its last line.

    launched: whether whoever started them told when; skipped: steps whose update was skipped; stalls: by the place of
    the line of its begin, microseconds that a checkpoint stopped training for, None where it did not come to its end.
    """

    begin_us: int
    stop_us: int
    lines: tuple[Line, ...]
    launched: bool
    skipped: frozenset[int]
    stalls: Mapping[int, int | None]


def lives_of(events: Sequence[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]) -> list[Life]:
    """Events are cut at each launch, or start that no launch precedes; metrics go with the start before them. events:
    at least one."""
    cut: list[list[Line]] = []
    for line in _lines(events, metric=False):
        started = bool(cut) and any(known.kind == "start" for known in cut[-1])
        if line.kind == "launch" or not cut or (line.kind == "start" and started):
            cut.append([])
        cut[-1].append(line)
    # By the clock of the first rank, which writes both: whoever launched it may have another.
    starts = [(line.told_us, number) for number, life in enumerate(cut) for line in life if line.kind == "start"]
    starts = starts or [(life[0].us, number) for number, life in enumerate(cut)]
    mine: list[list[Line]] = [[] for _ in cut]
    following = 0
    for line in _lines((entry for entry in metrics if entry["kind"] in TOLD), metric=True):
        while following < len(starts) and starts[following][0] <= line.told_us:
            following += 1
        mine[starts[max(0, following - 1)][1]].append(line)
    begins = [life[0].us for life in cut]
    last = max(line.us for line in (*cut[-1], *mine[-1]))
    return [
        _life(events, metrics, begin, stop)
        for events, metrics, (begin, stop) in zip(cut, mine, pairwise([*begins, last]), strict=True)
    ]


def _lines(entries: Iterable[Mapping[str, Any]], metric: bool) -> list[Line]:
    found, latest = list[Line](), 0
    for entry in entries:
        time_s = entry.get("time_s")
        latest = max(latest, round(time_s * US)) if isinstance(time_s, int | float) else latest
        found.append(Line(latest, str(entry["kind"]), metric, entry))
    return found


def _life(events: list[Line], metrics: list[Line], begin: int, stop: int) -> Life:
    # What the launcher tells comes before and after all that the ranks do, whatever its clock says.
    by_teller = {"launch": 0, "failed": 2}
    lines = sorted([*metrics, *events], key=lambda line: (by_teller.get(line.kind, 1), line.us))
    complete: dict[int, list[Line]] = {}
    for line in events:
        if line.kind == "checkpoint":
            complete.setdefault(line.step, []).append(line)
    stalls: dict[int, int | None] = {}
    for place, line in enumerate(lines):
        if line.kind == "checkpoint_begin":
            ends = [done for done in complete.get(line.step, ()) if done.us >= line.us]
            stalls[place] = ends[0].micros("blocked_s") if ends else None
    skipped = {line.step for line in events if line.kind == "not_finite" and line.values.get("action") == "skip"}
    return Life(begin, stop, tuple(lines), events[0].kind == "launch", frozenset(skipped), stalls)


def usual_step_us(lives: Sequence[Life]) -> int:
    """Median of the steps' microseconds; the first of a life counts only where there are no others, 0 without any."""
    steps = [[line.micros("step_s") for line in life.lines if line.metric and line.kind == "step"] for life in lives]
    later = [value for values in steps for value in values[1:]]
    return round(median(later or [value for values in steps for value in values] or [0]))
