"""Memory over a step as a file that Perfetto and chrome://tracing open: a counter of bytes by category for each rank.

While an action runs the counters show its fullest moment, then what it left. Times are the planner's; what comes before
and after the schedule takes a unit of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trigrid.check.prove import Proof
from trigrid.check.tracing import CATEGORIES
from trigrid.errors import Problem, Refused
from trigrid.ledger import Ledger
from trigrid.plan.simulate import simulate
from trigrid.report.trace import COMPUTE, Trace, TraceSpan, trace_events
from trigrid.schedule import Action
from trigrid.spec.job import Job

Span = tuple[float, float]


def write_snapshot(job: Job, proofs: Sequence[Proof], path: Path) -> None:
    """Write the memory of every proof's rank to `path`, aside first. Raises Refused where that fails."""
    events = list(snapshot_events(job, proofs))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    facts = {"model": job.model.name, "memory": "live storages of the second step, by category"}
    try:
        aside.write_text(
            json.dumps({"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}, allow_nan=False),
            encoding="utf-8",
        )
        aside.replace(path)
    except OSError as error:
        raise Refused([Problem("snapshot", path, f"cannot be written: {error.strerror}")]) from None


def snapshot_events(job: Job, proofs: Sequence[Proof]) -> Iterator[dict[str, Any]]:
    """The events of the file: a process for each rank, its actions and its counters."""
    timeline = simulate(job).timeline
    timed: dict[int, dict[Action, Span]] = {}
    for span in timeline.spans:
        timed.setdefault(span[0], {})[span[1]] = (span[2], span[3])
    spans: list[TraceSpan] = []
    counters: list[dict[str, Any]] = []
    for proof in proofs:
        known = timed.get(proof.pp, {})
        for (action, (start, stop)), sample in zip(_times(proof, known), proof.samples, strict=True):
            if isinstance(action, Action):
                spans.append(TraceSpan(proof.rank, COMPUTE, str(action.kind), *action[1:], start, stop))
            else:
                spans.append(TraceSpan(proof.rank, COMPUTE, action, None, None, start, stop))
            counters += [_counter(proof.rank, start, sample.peak), _counter(proof.rank, stop, sample.left)]
    names = {proof.rank: f"rank {proof.rank}: {proof.role}" for proof in proofs}
    yield from trace_events(Trace(spans, (), names))
    yield from counters


def _times(proof: Proof, known: Mapping[Action, Span]) -> list[tuple[Action | str, Span]]:
    """(action, (start_s, stop_s)) of each sample; what the planner has no time for takes as long as a mean action."""
    unit = sum(stop - start for start, stop in known.values()) / max(1, len(known)) or 1.0
    found: list[tuple[Action | str, Span]] = []
    # Time before the schedule: that of what comes before its first action.
    before = next((i for i, sample in enumerate(proof.samples) if sample.action in known), 0)
    now = 0.0
    for sample in proof.samples:
        action = sample.action
        if isinstance(action, Action) and action in known:
            start, stop = (before * unit + t for t in known[action])
        else:
            start, stop = now, now + unit
        found.append((action, (start, stop)))
        now = stop
    return found


def _counter(rank: int, time_s: float, memory: Ledger) -> dict[str, Any]:
    held = {name: memory[name] for name in CATEGORIES if memory[name]}
    return {"ph": "C", "name": "memory", "pid": rank, "ts": round(time_s * 1e9) / 1000, "args": held}
