"""How a run stands now, from the files that it keeps: under way or how it ended, its rates, what it would lose."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trigrid.report.console import duration
from trigrid.report.events import read_events
from trigrid.report.failures import failures
from trigrid.report.goodput import ENDED, FAILED, OPEN, STOPPED, Account, account
from trigrid.report.history import NAME as METRICS
from trigrid.report.lines import read_lines
from trigrid.spec.job import Job

SCHEMA = "trigrid.status/1"
STARTING, RUNNING, SILENT, HUNG = "starting", "running", "silent", "hung"
FINISHED, PREEMPTED = "finished", "preempted"
OVER = (FINISHED, PREEMPTED, FAILED, HUNG)
"""States in which no rank runs any more."""
FAILING = (FAILED, HUNG, SILENT)
"""States in which somebody should look."""
QUIET_S, QUIET_RECORDS = 60.0, 5.0
"""A run that has written nothing for longer, in seconds and in times between its lines, is silent."""


@dataclass(frozen=True)
class Fault:
    """The rank that failed first, if any is known, its node, and what it said."""

    rank: int | None
    host: str | None
    reason: str


@dataclass(frozen=True)
class Status:
    """A run of `steps` steps, `step` of which are done. Loss and rates are those of its last line; eta_s counts from
    now. checkpoint_step, checkpoint_age_s: of the newest that is complete; unsaved_steps: done since then. age_s: of
    its last line; patience_s: from which age on it is silent. fault: why it failed, or hangs."""

    name: str
    state: str
    step: int
    steps: int
    restarts: int
    age_s: float
    patience_s: float
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    step_s: float | None = None
    eta_s: float | None = None
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    unsaved_steps: int = 0
    preempted_by: str | None = None
    fault: Fault | None = None
    slow_rank: int | None = None


def status_of(run_dir: Path, job: Job, now_s: float) -> Status | None:
    """The status at the Unix time `now_s`; None before the run's first event."""
    events = read_events(run_dir)
    if not events:
        return None
    metrics = list(read_lines(run_dir / METRICS))
    found = account(events, metrics, now_s)
    life = _last_life(events)
    saved = next((event for event in reversed(events) if event["kind"] == "checkpoint"), None)
    step: dict[str, Any] = next((line for line in reversed(metrics) if line["kind"] == "step"), {})
    stopped: dict[str, Any] = next((event for event in reversed(life) if event["kind"] == "preempted"), {})
    patience_s = _patience_s(job, found, begun=any(event["kind"] == "first_step" for event in life))
    fault, hung = _fault(run_dir, life)
    state = _state(found, life, fault is not None, hung, patience_s)
    under_way = state in (RUNNING, SILENT)
    eta_s = step.get("eta_s")
    return Status(
        name=run_dir.resolve().name,
        state=state,
        step=found.steps,
        steps=job.run.steps,
        restarts=found.launches - 1,
        age_s=found.age_s,
        patience_s=patience_s,
        loss=step.get("loss"),
        tokens_per_s=step.get("tokens_per_s"),
        mfu=step.get("mfu_full"),
        step_s=step.get("step_s"),
        eta_s=max(0.0, eta_s - (now_s - step["time_s"])) if under_way and eta_s is not None else None,
        checkpoint_step=saved["step"] if saved else None,
        checkpoint_age_s=max(0.0, now_s - saved["time_s"]) if saved else None,
        unsaved_steps=found.unsaved_steps,
        preempted_by=stopped.get("signal"),
        fault=fault if state in FAILING else None,
        slow_rank=_slow(step),
    )


def _last_life(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events since the ranks were last started."""
    starts = [place for place, event in enumerate(events) if event["kind"] in ("launch", "start")]
    last = starts[-1] if starts else 0
    # A launch and the start that follows it are one.
    if last and events[last]["kind"] == "start" and events[last - 1]["kind"] == "launch":
        last -= 1
    return events[last:]


def _patience_s(job: Job, found: Account, begun: bool) -> float:
    """What a sound run may take from one line to the next."""
    if not begun or found.median_step_s is None:
        # Its first step, in which it may compile for minutes: the limit that its watchdog has.
        return max(QUIET_S, job.faults.first_step_s)
    between_s = found.median_step_s * job.run.log_every + (found.stall_s or 0.0)
    return max(QUIET_S, QUIET_RECORDS * between_s)


def _fault(run_dir: Path, life: list[dict[str, Any]]) -> tuple[Fault | None, bool]:
    """Why the ranks that were last started have failed, and whether that is because nothing went on any more."""
    begun_s = life[0]["time_s"]
    hung = any(event["kind"] == "hung" for event in life)
    told = next((event for event in reversed(life) if event["kind"] == "failed"), None)
    left = [failure for failure in failures(run_dir) if failure.when_s >= begun_s]
    if left:
        first = left[0]
        return Fault(first.rank, first.host or None, first.message), hung
    if told:
        return Fault(told.get("rank"), told.get("host"), str(told.get("reason") or told.get("signal"))), hung
    return None, hung


def _state(found: Account, life: list[dict[str, Any]], faulty: bool, hung: bool, patience_s: float) -> str:
    kinds = {event["kind"] for event in life}
    if found.state == ENDED:
        return FINISHED
    if found.state == STOPPED:
        return PREEMPTED
    if hung:
        return HUNG
    if found.state == FAILED or faulty:
        return FAILED
    if found.state == OPEN and found.age_s > patience_s:
        return SILENT
    return RUNNING if "first_step" in kinds else STARTING


def _slow(step: dict[str, Any]) -> int | None:
    """The rank that the others waited for in the last line's steps."""
    busy_s, usual_s = step.get("slowest_busy_s"), step.get("usual_busy_s")
    return step.get("slowest_rank") if busy_s and usual_s and busy_s > 1.5 * usual_s else None


def as_json(found: Status) -> dict[str, Any]:
    return {"schema": SCHEMA, **asdict(found)}


def status_text(found: Status) -> str:
    """A few lines for a person."""
    return "\n".join(_lines(found))


def _lines(found: Status) -> Iterator[str]:
    state = found.state
    if state == SILENT:
        state = f"silent for {duration(found.age_s)}, where {duration(found.patience_s)} is long: killed, or stuck"
    elif state == PREEMPTED and found.preempted_by:
        state = f"preempted by {found.preempted_by}"
    again = f", restarted {found.restarts} time{'s' if found.restarts > 1 else ''}" if found.restarts else ""
    yield f"{found.name}: {state}{again}"
    if found.fault:
        who = "" if found.fault.rank is None else f"rank {found.fault.rank}"
        who += f" on {found.fault.host}" if found.fault.host else ""
        first, *more = found.fault.reason.splitlines()
        yield f"  {who}: {first}" if who and not first.startswith(who) else f"  {first}"
        yield from (f"    {line}" for line in more)
    words = [f"step {found.step:,} of {found.steps:,}"]
    words += [f"loss {found.loss:.4f}"] if found.loss is not None else []
    words += [f"{found.tokens_per_s:,.0f} tok/s"] if found.tokens_per_s is not None else []
    words += [f"MFU {found.mfu:.1%}"] if found.mfu is not None else []
    words += [f"{duration(found.eta_s)} left"] if found.eta_s is not None else []
    words += [f"waiting for rank {found.slow_rank}"] if found.slow_rank is not None else []
    yield f"  {', '.join(words)}"
    if found.checkpoint_step is not None and found.checkpoint_age_s is not None:
        saved = f"checkpoint of step {found.checkpoint_step:,}, {duration(found.checkpoint_age_s)} ago"
    else:
        saved = "no checkpoint"
    lost = f"; {found.unsaved_steps:,} steps after it would be lost" if found.unsaved_steps else ""
    yield f"  {saved}{lost}"
    yield f"  last line {duration(found.age_s)} ago"


def follow(run_dir: Path, job: Job, every_s: float) -> Iterator[Status]:
    """The status each time that it has changed in more than its ages, until the run is over."""
    before: tuple[object, ...] | None = None
    while True:
        found = status_of(run_dir, job, time.time())
        if found is not None:
            now = (found.state, found.step, found.loss, found.checkpoint_step, found.restarts, found.fault)
            if now != before:
                before = now
                yield found
            if found.state in OVER:
                return
        time.sleep(every_s)
