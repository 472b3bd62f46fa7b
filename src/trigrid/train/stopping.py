"""Being told to stop: signals that are noted when they come, and answered at the end of a step.

SIGTERM, SIGUSR1 and SIGUSR2 are what schedulers send before they take the machine away (Slurm: --signal=USR1@120).
Whether a run was stopped so, or failed, is told by the file preempted.json in its folder, not by an exit code.

A handler in Python runs only between two instructions of the main thread, which may be in a collective for minutes; a
thread of its own learns of the signal at once through `signal.set_wakeup_fd` and keeps the time of grace.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from trigrid.launch.place import MARKER
from trigrid.train.failure import give_up, replace

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
GRACE_S = 60.0
"""Until the job is read."""
POLL_S = 0.5


@dataclass(frozen=True)
class Preempted:
    """step: the last that was done; checkpoint: the folder it can be resumed from, if there is one; signal: that was
    sent; time_s: Unix time."""

    step: int
    checkpoint: str | None
    signal: str | None
    time_s: float


class _Notes:
    """What this process has been told: signals belong to processes, and so does this."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.told_s = 0.0
        self.grace_s = GRACE_S
        self.run_dir: Path | None = None
        self.installed = self.answered = False

    def note(self, number: int) -> None:
        # The first counts: what is sent again, to be sure, does not prolong the time.
        if self.number is None:
            self.told_s = time.monotonic()
            self.number = number


_notes = _Notes()


def install() -> None:
    """From now on signals to stop are noted. Once more does nothing; only in the main thread."""
    if _notes.installed:
        return
    _notes.installed = True
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, _handle)
    # What this process starts by forking is ended by SIGTERM like any other, and must not write to this pipe.
    os.register_at_fork(before=_hold_back, after_in_parent=let_through, after_in_child=_uninstall)
    threading.Thread(target=_listen, args=(heard,), daemon=True).start()
    # The launcher holds them back until here: before, they would have ended this process.
    let_through()


def grant(grace_s: float, run_dir: Path | None = None) -> None:
    """How long this process has from the signal to its end, and where it leaves word if that is not enough."""
    _notes.grace_s = grace_s
    _notes.run_dir = run_dir or _notes.run_dir


def asked() -> str | None:
    """The name of the first signal that told this process to stop, or None."""
    return None if _notes.number is None else signal.Signals(_notes.number).name


def mark(run_dir: Path, step: int, checkpoint: Path | None, name: str | None) -> None:
    """Leave word that the run was stopped by the signal of that name after `step`, and can go on from `checkpoint`."""
    marker = Preempted(step, str(checkpoint) if checkpoint else None, name, time.time())
    replace(run_dir / MARKER, json.dumps(asdict(marker)))


def answer() -> None:
    """What this process was told to do is done: the time of grace is over."""
    _notes.answered = True


def unmark(run_dir: Path) -> None:
    """The run goes on."""
    (run_dir / MARKER).unlink(missing_ok=True)


def read_marker(run_dir: Path) -> Preempted | None:
    """How the run was stopped, or None where it was not."""
    path = run_dir / MARKER
    return Preempted(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _handle(number: int, frame: FrameType | None) -> None:
    _notes.note(number)


def _hold_back() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def let_through() -> None:
    """Signals to stop reach this process, those that were held back until now first."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _uninstall() -> None:
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    let_through()


def _listen(heard: int) -> None:
    while _notes.number is None:
        if select.select([heard], [], [], POLL_S)[0]:
            for number in os.read(heard, 64):
                if number in SIGNALS:
                    _notes.note(number)
    while (left_s := _notes.told_s + _notes.grace_s - time.monotonic()) > 0:
        time.sleep(min(left_s, POLL_S))
    if not _notes.answered:
        # A launcher of another kind gives each rank its number by another name.
        rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
        give_up(
            rank,
            f"told to stop by {asked()}, but its step and its checkpoint took longer than the time of grace "
            f"(faults.grace_s = {_notes.grace_s:g}); earlier checkpoints are as they were",
            _notes.run_dir,
        )
