"""What is said along the way, all of it on standard error; standard output is kept for results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S, LONGEST_S = 2.0, 30.0
"""Work that is silent is heard of after PATIENCE_S, then ever less often, at least every LONGEST_S."""
TICK_S = 0.25
PAGE_COLUMNS = 80
NAMED = 3


class Console:
    """The person who waits: at a terminal, or reading lines in a file, or, if `quiet`, only to be warned."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        # FORCE_COLOR and its like would have rich draw bars into files, so it is not asked.
        self.on_terminal = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = self.on_terminal and not os.environ.get("NO_COLOR")

    @property
    def width(self) -> int:
        """Columns of the terminal, or of a page."""
        # A terminal may not know its own width.
        return (os.get_terminal_size(sys.stderr.fileno()).columns if self.on_terminal else 0) or PAGE_COLUMNS

    def say(self, text: str) -> None:
        """A line, or several."""
        if not self.quiet:
            _write(text)

    def heading(self, text: str) -> None:
        """A line above others; a terminal shows it in bold."""
        self.say(f"\033[1m{text}\033[0m" if self.on_terminal else text)

    def warn(self, text: str) -> None:
        """What the person must know, quiet or not."""
        _write(f"warning: {text}")

    def progress(self) -> PhaseProgress:
        return PhaseProgress(self)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say that `what` goes on and for how long, while the body of the `with` runs, if that takes a while."""
        over = Event()
        with self.progress() as progress:

            def beat() -> None:
                while not over.wait(TICK_S):
                    progress(what, 0, 0)

            thread = Thread(target=beat, daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
                progress.hide(what)


class PhaseProgress:
    """Shows (phase, done, total), where a total of 0 is one not known yet: bars on a terminal, elsewhere a line now and
    then, nothing where `console` is quiet. Use as a context manager and call it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = _bars() if console.on_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._phase, self._pace = "", Pace()

    def __enter__(self) -> PhaseProgress:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        if self._bars:
            self._bars.start()
            # A signal that ends this process would leave the terminal without its cursor.
            self._bars.console.show_cursor(True)

    def stop(self) -> None:
        """Leave the bars as they are; once more does nothing."""
        if self._bars:
            self._bars.stop()

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """`note` stands at the end of the bar."""
        if phase != self._phase:
            # The first phase began with this object.
            self._pace = Pace() if self._phase else self._pace
            self._phase = phase
        amount = f"{done:,} of {total:,}" if total else f"{done:,}" if done else ""
        if self._bars:
            if phase not in self._tasks:
                self._tasks[phase] = self._bars.add_task(phase, amount="", note="")
            self._bars.update(self._tasks[phase], completed=done, total=total or None, amount=amount, note=note)
        elif self._pace.due():
            self._console.say(f"{phase}: {amount or duration(self._pace.elapsed_s)}")

    def hide(self, phase: str) -> None:
        """Take the bar of a phase away."""
        if self._bars and phase in self._tasks:
            self._bars.remove_task(self._tasks.pop(phase))


class Pace:
    """When to say that something still goes on: after PATIENCE_S, then at intervals that double up to LONGEST_S."""

    def __init__(self) -> None:
        self._begun_s = self._said_s = time.monotonic()
        self._interval_s = PATIENCE_S

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def due(self) -> bool:
        """True where it is time; the next interval starts then."""
        now = time.monotonic()
        if now - self._said_s < self._interval_s:
            return False
        self._said_s = now
        self._interval_s = min(2 * self._interval_s, LONGEST_S)
        return True


def _bars() -> Progress:
    from rich.console import Console as Screen
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    # Standard error is redirected so that lines appear above the bars; results on standard output are not.
    screen = Screen(stderr=True, force_terminal=True)
    return Progress(*columns, console=screen, redirect_stdout=False, refresh_per_second=1 / TICK_S)


def _write(text: str) -> None:
    # In one piece: another thread or another process may write, too.
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def duration(seconds: float) -> str:
    """A duration as a person says it: 42s, 3m07s, 5h20m, 12d03h."""
    whole = round(seconds)
    for unit, smaller, per, label in ((86_400, 3_600, "d", "h"), (3_600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= unit:
            return f"{whole // unit}{per}{whole % unit // smaller:02}{label}"
    return f"{whole}s"


def some(names: Sequence[str]) -> str:
    """The first few of `names`, and how many there are besides."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")


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
