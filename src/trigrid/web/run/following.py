"""A run's metrics and events, read as they grow: each line once, whole lines only."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trigrid.report.events import NAME as EVENTS
from trigrid.report.history import NAME as METRICS
from trigrid.report.lives import TOLD
from trigrid.web.run.folder import file_in

PIECE = 1 << 22
"""Bytes read at once."""
COLUMNS = (
    "step",
    "loss",
    "gradient_norm",
    "learning_rate",
    "tokens",
    "step_s",
    "tokens_per_s",
    "tokens_per_s_per_rank",
    "mfu_full",
    "mfu_causal",
    "data_wait_share",
    "peak_memory_bytes",
    "eta_s",
    "time_s",
)
"""Of each recorded step, what the page draws."""
KEPT = ("kind", "time_s", "step", "step_s")
"""Of each line of metrics, what says where the time went."""


class Tail:
    """What a file of lines has gained since it was last read."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._place, self._node = 0, 0

    def begun_anew(self) -> bool:
        """Whether the file is another one, or shorter than what was read of it."""
        path = file_in(self._folder, self._name)
        found = path.stat() if path else None
        node, size = (found.st_ino, found.st_size) if found else (0, 0)
        anew = self._place > 0 and (node != self._node or size < self._place)
        self._node = node
        return anew

    def rewind(self) -> None:
        self._place = 0

    def entries(self) -> Iterator[dict[str, Any]]:
        """The objects of whole lines that were not read before; a line that is still being written waits for its end,
        and one that was torn is left out."""
        path = file_in(self._folder, self._name)
        if path is None:
            return
        with path.open("rb") as file:
            file.seek(self._place)
            rest = b""
            while piece := file.read(PIECE):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._place += len(line) + 1
                    if (entry := _entry(line)) is not None:
                        yield entry


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("kind"), str) else None


@dataclass
class Series:
    """Rows in order of their steps, each with the number of the line that it came from. A step that is done again
    takes the place of all from there on."""

    steps: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def put(self, step: int, line: int, row: tuple[Any, ...]) -> None:
        place = len(self.steps)
        while place and self.steps[place - 1] >= step:
            place -= 1
        del self.steps[place:], self.lines[place:], self.rows[place:]
        self.steps.append(step)
        self.lines.append(line)
        self.rows.append(row)

    def since(self, line: int) -> list[tuple[Any, ...]]:
        """The rows of later lines: all from the first of their steps on."""
        return self.rows[bisect_right(self.lines, line) :]


@dataclass
class Slow:
    """How often a rank was the slowest of a record, and how long it was busy compared with ranks like it: at worst,
    and when last seen."""

    records: int = 0
    worst: float = 0.0
    last: float = 0.0


class Following:
    """The files of one run. lines: read so far, never fewer than before; begin: before the first of those that still
    count."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._events = Tail(folder, METRICS), Tail(folder, EVENTS)
        self.lines = 0
        self._forget()

    def _forget(self) -> None:
        self.steps, self.validation = Series(), Series()
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.facts: dict[str, Any] | None = None
        self.slow: dict[int, Slow] = {}
        self.begin = self.lines

    def read(self) -> None:
        """Take in what was written since. Raises Refused where a file has become a link out of the folder."""
        files = (self._metrics, self._events)
        if any([file.begun_anew() for file in files]):
            self.lines += 1
            self._forget()
            for file in files:
                file.rewind()
        for entry in self._events.entries():
            self.lines += 1
            self.events.append(entry)
        for entry in self._metrics.entries():
            self.lines += 1
            self._take(entry)

    def _take(self, entry: Mapping[str, Any]) -> None:
        kind, step = entry["kind"], entry.get("step")
        if kind in TOLD:
            self.metrics.append({name: entry[name] for name in KEPT if name in entry})
        if kind == "start":
            self.facts = dict(entry)
        elif kind == "step" and isinstance(step, int):
            self.steps.put(step, self.lines, tuple(map(entry.get, COLUMNS)))
            self._slowest(entry)
        elif kind == "validation" and isinstance(step, int):
            self.validation.put(step, self.lines, (step, entry.get("loss")))

    def _slowest(self, entry: Mapping[str, Any]) -> None:
        rank, busy, usual = (entry.get(name) for name in ("slowest_rank", "slowest_busy_s", "usual_busy_s"))
        if isinstance(rank, int) and isinstance(busy, int | float) and isinstance(usual, int | float) and usual > 0:
            slow = self.slow.setdefault(rank, Slow())
            slow.records += 1
            slow.last = busy / usual
            slow.worst = max(slow.worst, slow.last)
