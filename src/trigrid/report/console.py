"""Progress and training steps as lines of text, on standard error; standard output is kept for results."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

QUIET_S = 2.0


class PhaseProgress:
    """Shows (phase, done, total), where a total of 0 is one not known yet: a bar on a terminal, elsewhere a line at
    most every two seconds. Use as a context manager and call it."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console) if console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._said_s = time.monotonic()

    def __enter__(self) -> PhaseProgress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._bars:
            if phase not in self._tasks:
                self._tasks[phase] = self._bars.add_task(phase, total=None)
            self._bars.update(self._tasks[phase], completed=done, total=total or None)
            return
        now = time.monotonic()
        if now - self._said_s >= QUIET_S:
            self._said_s = now
            say(f"{phase}: {done:,} of {total:,}" if total else f"{phase}: {done:,}")


def say(line: str) -> None:
    """A line for the person who waits."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class StepLine:
    """One training step. memory: the largest peak of any rank; data_wait_share: of the step's time, the slowest
    rank's."""

    step: int
    steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float
    peak_memory_bytes: int
    data_wait_share: float
    eta_s: float

    HEADER = "   step      loss  grad norm        lr     tok/s  TFLOP/s    MFU   peak GiB  data wait      ETA"

    def __str__(self) -> str:
        return (
            f"{self.step:>4}/{self.steps:<4} {self.loss:>7.4f}  {self.gradient_norm:>9.3f}  {self.learning_rate:>8.2e}"
            f"  {self.tokens_per_s:>8,.0f}  {self.flops_per_s / 1e12:>7.3f}  {self.mfu:>5.1%}"
            f"  {self.peak_memory_bytes / 2**30:>9.2f}  {self.data_wait_share:>9.1%}  {duration(self.eta_s):>7}"
        )


def duration(seconds: float) -> str:
    """A duration as a person says it: 42s, 3m07s, 5h20m, 12d03h."""
    whole = round(seconds)
    for unit, smaller, per, label in ((86_400, 3_600, "d", "h"), (3_600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= unit:
            return f"{whole // unit}{per}{whole % unit // smaller:02}{label}"
    return f"{whole}s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first to the left, the others to the right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
