"""A thread on each rank that sees when nothing goes on any more, and ends the run with a word about who is the cause.

The rank whose limit is over calls the others, all through files in the run's folder, since a collective is what does
not work then. Every rank that lives answers with what it does and for whom it waits; after a while the lowest of them
names the ranks that said nothing (stopped, dead, cut off) and those that wait for nobody, leaves that as the failure,
and all end. A rank that waits for a slow one makes no progress either, but is not the cause, and not named as such.

Limits count time in which this process ran: a job that is suspended as a whole is not hung.

On CUDA the host runs ahead of the device (see `engine.activity`): where a kernel stands still, all hosts wait for their
devices at the end of the step, and nobody can be named but those whose host is missing or elsewhere.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from trigrid.engine.activity import Activity
from trigrid.report.events import EventLog
from trigrid.report.failures import STALLS
from trigrid.spec.job import Faults
from trigrid.train import stopping
from trigrid.train.failure import give_up, replace
from trigrid.train.stall import Report, actions, cut_off, missing, reaches, read_reports, verdict

LOOKS = 60
"""In the shortest limit; between LOOK_S[0] and LOOK_S[1] from each other."""
LOOK_S = 0.2, 3.0
FRAMES = 12
REACH_S = 0.5
"""In which another node answers; all of a network that works does, in milliseconds."""

LimitName = Literal["start_s", "first_step_s", "step_s", "checkpoint_s"]


class Watchdog:
    """Watches `activity` of this rank while it is entered.

    Tell it each phase: "start" (as it begins), "step N", "checkpoint"; others have the limit of a step. The first step
    of this process, whatever its number, has its own limit.

    hosts: by rank, where there are several; first_at: where the first rank's node listens, for one rank of each node to
    look whether it can be reached.
    """

    def __init__(
        self,
        activity: Activity,
        faults: Faults,
        run_dir: Path,
        rank: int,
        world: int,
        hosts: Sequence[str] = (),
        first_at: tuple[str, int] | None = None,
    ) -> None:
        self._activity, self._faults = activity, faults
        self._hosts, self._first_at = hosts, first_at
        self._run_dir, self._rank, self._world = run_dir, rank, world
        self._limit: LimitName = "start_s"
        self._steps: set[str] | None = set()
        limits = (faults.start_s, faults.first_step_s, faults.step_s, faults.checkpoint_s)
        self._look_s = min(max(min(limits) / LOOKS, LOOK_S[0]), LOOK_S[1])
        # Twice, since the others look so often, and again for a folder on a network.
        self._answer_s = 4 * self._look_s + 1
        self._over = threading.Event()
        self._begun_s = time.time()
        self._trains = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        stopping.grant(faults.grace_s, run_dir)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The training is over, or has failed; what follows, such as trackers that finish, takes as long as it takes.
        self._over.set()
        stopping.answer()

    def phase(self, name: str) -> None:
        """Another phase begins."""
        self._limit = self._limit_of(name)
        self._activity.begin(name)

    def _limit_of(self, phase: str) -> LimitName:
        if phase == "start":
            return "start_s"
        if phase == "checkpoint":
            return "checkpoint_s"
        if self._steps is not None and phase.startswith("step "):
            self._steps.add(phase)
            if len(self._steps) == 1:
                return "first_step_s"
            self._steps = None
        return "step_s"

    def _watch(self) -> None:
        seen, stuck_s, looked_s = -1, 0.0, time.monotonic()
        while not self._over.wait(self._look_s):
            now_s = time.monotonic()
            # What is more than this thread was asleep for is time in which the process did not run.
            passed_s, looked_s = min(now_s - looked_s, 2 * self._look_s), now_s
            if seen != self._activity.changes:
                seen, stuck_s = self._activity.changes, 0.0
                called = self._called()
            else:
                stuck_s += passed_s
                called = stuck_s > self._limit_s or self._called()
            if called and not self._goes_on(stuck_s):
                return

    @property
    def _limit_s(self) -> float:
        return float(getattr(self._faults, self._limit))

    @property
    def _call(self) -> Path:
        return self._run_dir / STALLS / "call"

    def _called(self) -> bool:
        """Whether a rank of this attempt has called."""
        try:
            # Written by a rank, since the clock of a file system is its own.
            return float(self._call.read_text()) > self._begun_s
        except (OSError, ValueError):
            return False

    def _goes_on(self, stuck_s: float) -> bool:
        """Answer, and end this process unless the rank that called goes on after all, or training is over."""
        changes, mine = self._activity.changes, stuck_s > self._limit_s
        answer = self._report(stuck_s)
        # A disk that takes nothing must not keep this process alive.
        with suppress(OSError):
            if not self._called():
                replace(self._call, str(time.time()))
            answer.save(self._run_dir)
        if self._over.wait(self._answer_s):
            return False
        if moved := mine and changes != self._activity.changes:
            self._call.unlink(missing_ok=True)
        if moved or not (mine or self._called()):
            answer.path(self._run_dir).unlink(missing_ok=True)
            return True
        reports = read_reports(self._run_dir, self._world, self._begun_s)
        if reports and min(reports) < self._rank:
            # That rank speaks.
            self._over.wait(self._answer_s)
            os._exit(1)
        self._tell(reports, stuck_s)
        return False

    def _tell(self, reports: dict[int, Report], stuck_s: float) -> None:
        longest = max((report.stuck_s for report in reports.values()), default=stuck_s)
        absent = missing(reports, self._world)
        lost = cut_off(reports, self._hosts) if self._hosts else []
        told = {"missing": absent, "cut_off": lost, "actions": actions(reports)}
        EventLog(self._run_dir).write("hung", **told, phase=self._activity.phase, stuck_s=longest)
        give_up(
            self._rank,
            f"nothing has gone on for {longest:.0f} s in {self._activity.phase} (faults.{self._limit} = "
            f"{self._limit_s:g} s)\n{verdict(reports, self._world, self._hosts)}",
            self._run_dir,
        )

    def _report(self, stuck_s: float) -> Report:
        activity = self._activity
        frame = sys._current_frames().get(self._trains or 0)
        calls = traceback.extract_stack(frame)[-FRAMES:] if frame else []
        stack = tuple(f"{'/'.join(Path(c.filename).parts[-2:])}:{c.lineno} in {c.name}" for c in calls)
        action = None if activity.action is None else str(activity.action)
        lost = self._first_at is not None and not reaches(*self._first_at, REACH_S)
        return Report(self._rank, activity.phase, action, activity.waiting, stuck_s, stack, time.time(), lost)
