"""What one rank does now, for a watchdog that looks from another thread."""

from __future__ import annotations

from typing import NamedTuple


class Waiting(NamedTuple):
    """kind: of call; axis: its group's, or "" for a message; ranks: all that must come for it to end, this one among
    them where it is a collective."""

    kind: str
    axis: str
    ranks: tuple[int, ...]


class Activity:
    """phase: "start", "step 7", "checkpoint"; action: of the schedule, or another word, whatever its `str` says;
    waiting: for whom, None where this rank waits for nobody; changes: grows with each of them.

    Written by the thread that trains, by assignment alone, since it is done hundreds of times a step; another thread
    may see a new action beside what the last one waited for, and looks again.

    On CUDA the host runs ahead of the device: action and waiting are the host's. It gets to the end of the step, where
    it waits until the device has come so far (`Waiting("device", ...)`), while a kernel of an earlier action may be
    what stands still; a rank whose host stopped or never came is told apart all the same.
    """

    __slots__ = ("action", "changes", "phase", "waiting")

    def __init__(self) -> None:
        self.phase = "start"
        self.action: object = None
        self.waiting: Waiting | None = None
        self.changes = 0

    def begin(self, phase: str) -> None:
        """Another phase, which has no action yet."""
        self.phase = phase
        self.action = None
        self.changes += 1

    def act(self, action: object) -> None:
        self.action = action
        self.changes += 1

    def wait(self, waiting: Waiting | None) -> None:
        """From now on this rank waits for those, or for nobody."""
        self.waiting = waiting
        self.changes += 1
