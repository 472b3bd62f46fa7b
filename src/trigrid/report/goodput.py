"""Where the time of a run went, from its events and metrics, without remainder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from trigrid.report.events import read_events
from trigrid.report.history import NAME as METRICS
from trigrid.report.lines import read_lines
from trigrid.report.lives import US, Life, Line, lives_of, usual_step_us

CAUSES = {
    "productive": "steps whose result was kept",
    "redone": "steps, and parts of steps, that a failure has thrown away",
    "rewound": "steps thrown away by going back, updates that were skipped, and going back",
    "start-up": "from the launch of the ranks to the first step",
    "first step": "what the first step after a start takes longer than the median: compiling, connecting",
    "checkpoint": "training stood still for a checkpoint",
    "validation": "held-out text, with what else lies between two steps where there was one",
    "detection": "from a failure until it was known",
    "waiting": "from the end of the ranks to their next launch",
    "other": "between steps, and after the last",
}
"""What each cause stands for, in the order of the table."""
ENDED, STOPPED, FAILED, KILLED, OPEN = "ended", "stopped", "failed", "killed", "under way, or killed"


@dataclass(frozen=True)
class Failure:
    """One end that was not wanted. how: FAILED (told by the process that started the ranks) or KILLED (all at once,
    nothing told); rank and reason: of what was told; detected_s: from the failure until it was known; lost_steps: done
    before it and not in the checkpoint that the run went on from, or would; None while it is not known."""

    time_s: float
    how: str
    rank: int | None
    reason: str
    detected_s: float | None
    lost_steps: int | None


@dataclass(frozen=True)
class Account:
    """A run from its first launch to its last line. seconds: by cause, in the order of CAUSES; their sum is wall_s.

    steps: done and kept; unsaved_steps: those of them that no complete checkpoint has; median_step_s, stall_s (of
    training, by one checkpoint), write_s (from there until it was complete), restart_s (from a launch to the first
    step's end), detect_s: as measured, None where they were not. age_s: of the last line, at `now`.
    """

    begin_s: float
    wall_s: float
    seconds: Mapping[str, float]
    state: str
    launches: int
    steps: int
    unsaved_steps: int
    rewinds: int
    rewound_steps: int
    checkpoints: int
    failures: tuple[Failure, ...]
    median_step_s: float | None
    stall_s: float | None
    write_s: float | None
    restart_s: float | None
    detect_s: float | None
    age_s: float

    @property
    def productive_share(self) -> float:
        return self.seconds["productive"] / self.wall_s if self.wall_s else 0.0


@dataclass
class _Chunk:
    """Steps done one after the other, those after `low` to `high`, in `us` of the wall clock."""

    low: int
    high: int
    us: int


def account_of(run_dir: Path, now_s: float) -> Account | None:
    """The account of the run in `run_dir` at the Unix time `now_s`; None where it has no events."""
    events = read_events(run_dir)
    return account(events, read_lines(run_dir / METRICS), now_s) if events else None


def account(events: Sequence[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]], now_s: float) -> Account:
    """Give each moment between the first and the last line to one cause.

    All is counted in whole microseconds, so that nothing remains; a clock that goes back stands still instead.
    events: at least one.
    """
    lives = lives_of(events, metrics)
    walk = _Walk(usual_step_us(lives))
    for life in lives:
        walk.live(life, last=life is lives[-1])
    return walk.account(lives, now_s)


class _Walk:
    """Goes through the lives of a run, moment by moment. `chunks` are the steps whose result still counts."""

    def __init__(self, usual_us: int) -> None:
        self._usual_us = usual_us
        self._us = dict.fromkeys(CAUSES, 0)
        self._chunks: list[_Chunk] = []
        self._failures: list[Failure] = []
        self._pending: list[int] = []
        self._position = self._saved = self._cursor = 0
        self._rewinds = self._rewound = self._checkpoints = 0
        self._state = OPEN
        self._launch_us: int | None = None
        self._stuck_us: int | None = None
        self._restarts_us: list[int] = []
        self._stalls_us: list[int] = []
        self._writes_us: list[int] = []

    def live(self, life: Life, last: bool) -> None:
        """Account for one start of the ranks, up to the next."""
        self._cursor, self._state, self._phase = life.begin_us, OPEN, "first"
        self._launch_us = life.begin_us if life.launched else None
        self._skipped = life.skipped
        self._window_steps = self._window_us = 0
        self._open_gap()
        told = any(line.kind == "failed" for line in life.lines)
        self._stuck_us = None
        for place, line in enumerate(life.lines):
            until = min(max(line.us, self._cursor), life.stop_us)
            if self._state != OPEN:
                self._spend("waiting", until)
            elif line.kind == "checkpoint_begin":
                if line.step > self._position:
                    self._steps(until, line.step, None)
                stall_us = life.stalls[place]
                self._stall_us += stall_us or 0
                self._torn |= stall_us is None
            elif line.kind == "hung":
                self._stuck_us = until - line.micros("stuck_s")
                if not told:
                    self._fails(until, line, "hung")
            elif line.kind == "failed":
                self._fails(until, line, str(line.values.get("reason") or line.values.get("signal") or "failed"))
            else:
                self._line(line, until)
        if self._state == OPEN:
            seen = min(max(self._cursor, *(line.us for line in life.lines)), life.stop_us)
            self._under_way(seen, "productive" if last else "redone")
            if not last:
                self._ends(Failure(seen / US, KILLED, None, "ended without a word", None, None))
        self._spend("waiting", life.stop_us)

    def _line(self, line: Line, until: int) -> None:
        if line.metric:
            match line.kind:
                case "start":
                    self._spend("start-up", until)
                case "step":
                    if line.step > self._position:
                        self._steps(until, line.step, line.micros("step_s"))
                    self._window_steps = self._window_us = 0
                case "validation":
                    self._validated = True
            return
        match line.kind:
            case "start":
                self._spend("start-up", until)
                self._resume(line.step)
            case "first_step" if line.step > self._position:
                self._steps(until, line.step, line.micros("step_s") or None)
            case "checkpoint":
                self._saved = line.step
                self._checkpoints += 1
                self._stalls_us.append(line.micros("blocked_s"))
                self._writes_us.append(max(0, line.micros("seconds") - line.micros("blocked_s")))
            case "rewind":
                self._go_back(until, int(line.number("from_step")), int(line.number("to_step")))
            case "end" | "preempted":
                self._steps(until, max(line.step, self._position), None)
                self._state = ENDED if line.kind == "end" else STOPPED

    def _open_gap(self) -> None:
        """What is known of the time since the last step: its stall, whether a checkpoint did not come to its end,
        whether there was a validation."""
        self._stall_us, self._torn, self._validated = 0, False, False

    def _spend(self, cause: str, until: int) -> None:
        self._us[cause] += until - self._cursor
        self._cursor = until

    def _resume(self, step: int) -> None:
        """The ranks go on after `step`: what is later is thrown away."""
        lost = self._roll_back(step, "redone")
        for number in self._pending:
            self._failures[number] = replace(self._failures[number], lost_steps=lost)
            lost = 0
        self._pending.clear()
        self._saved = step

    def _roll_back(self, step: int, cause: str) -> int:
        """Give the time of steps after `step` to `cause`; how many they are."""
        while self._chunks and self._chunks[-1].high > step:
            chunk = self._chunks.pop()
            steps = chunk.high - max(chunk.low, step)
            us = chunk.us * steps // (chunk.high - chunk.low)
            self._us[cause] += us
            self._us["productive"] -= us
            if chunk.low < step:
                self._chunks.append(_Chunk(chunk.low, step, chunk.us - us))
        lost, self._position = max(0, self._position - step), step
        return lost

    def _steps(self, until: int, step: int, mean_us: int | None) -> None:
        """At `until` all steps up to `step` are done, in mean_us each since the last line of metrics where that is
        known. The rest of the time goes to what lay between them."""
        gap, count = until - self._cursor, max(0, step - self._position)
        if not count:
            trained = 0
        elif mean_us is not None:
            # The mean is also of those steps since that line which are accounted for already.
            trained = mean_us * (self._window_steps + count) - self._window_us
        elif self._validated:
            trained = self._usual_us * count
        else:
            trained = gap - self._stall_us
        trained = min(max(0, trained), gap)
        self._window_steps += count
        self._window_us += trained
        rest = gap - trained
        if count and self._phase == "first":
            excess = max(0, trained - self._usual_us * count) if self._usual_us else 0
            self._us["first step"] += excess
            trained -= excess
            if self._launch_us is not None:
                self._restarts_us.append(until - self._launch_us)
        if count:
            self._count(step, count, trained)
        self._between(rest)
        self._phase = "train" if count else self._phase
        self._cursor = until
        self._open_gap()

    def _count(self, step: int, count: int, us: int) -> None:
        skipped = us * sum(self._position < number <= step for number in self._skipped) // count
        self._us["rewound"] += skipped
        self._us["productive"] += us - skipped
        self._chunks.append(_Chunk(self._position, step, us - skipped))
        self._position = step

    def _between(self, rest: int) -> None:
        stalled = min(rest, self._stall_us)
        self._us["checkpoint"] += stalled
        if self._validated:
            cause = "validation"
        elif self._torn:
            cause = "checkpoint"
        else:
            cause = {"first": "start-up", "back": "rewound"}.get(self._phase, "other")
        self._us[cause] += rest - stalled

    def _go_back(self, until: int, from_step: int, to_step: int) -> None:
        stalled = min(until - self._cursor, self._stall_us)
        self._spend("checkpoint", self._cursor + stalled)
        self._spend("rewound", until)
        self._position = max(self._position, from_step)
        self._rewound += self._roll_back(to_step, "rewound")
        self._rewinds += 1
        self._saved, self._phase = to_step, "back"
        self._window_steps = self._window_us = 0
        self._open_gap()

    def _under_way(self, until: int, cause: str) -> None:
        """What was done after the last step that is known of goes to `cause`."""
        if self._phase == "first":
            cause = "start-up"
        elif self._validated:
            cause = "validation"
        stalled = min(until - self._cursor, self._stall_us)
        self._spend("checkpoint", self._cursor + stalled)
        self._spend(cause, until)

    def _fails(self, until: int, line: Line, reason: str) -> None:
        """A failure is told of at `until`; it began before, by the time to detect it."""
        stuck = 0 if self._stuck_us is None else until - self._stuck_us
        detected = max(line.micros("detected_s"), stuck)
        measured = self._stuck_us is not None or line.values.get("detected_s") is not None
        self._under_way(max(self._cursor, until - detected), "redone")
        self._spend("detection", until)
        rank = line.values.get("rank")
        told = detected / US if measured else None
        self._ends(Failure(until / US, FAILED, rank if isinstance(rank, int) else None, reason, told, None))

    def _ends(self, failure: Failure) -> None:
        self._state = failure.how
        self._pending.append(len(self._failures))
        self._failures.append(failure)

    def account(self, lives: Sequence[Life], now_s: float) -> Account:
        """After the last life."""
        # Where it would go on from, if it is over, or has started again and not got to where it goes on.
        if self._pending:
            self._resume(self._saved)
        begin, end = lives[0].begin_us, lives[-1].stop_us
        detected = [failure.detected_s for failure in self._failures if failure.detected_s is not None]
        again = self._restarts_us[1:] or self._restarts_us
        return Account(
            begin_s=begin / US,
            wall_s=(end - begin) / US,
            seconds={cause: us / US for cause, us in self._us.items()},
            state=self._state,
            launches=len(lives),
            steps=self._position,
            unsaved_steps=max(0, self._position - self._saved),
            rewinds=self._rewinds,
            rewound_steps=self._rewound,
            checkpoints=self._checkpoints,
            failures=tuple(self._failures),
            median_step_s=self._usual_us / US or None,
            stall_s=median(self._stalls_us) / US if self._stalls_us else None,
            write_s=median(self._writes_us) / US if self._writes_us else None,
            restart_s=fmean(again) / US if again else None,
            detect_s=fmean(detected) if detected else None,
            age_s=max(0.0, now_s - end / US),
        )
