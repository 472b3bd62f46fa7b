"""Timelines as JSON that Perfetto and chrome://tracing open, of a simulated step and of a real one alike.

The format is the JSON object form of the Trace Event Format (Chromium project): a process per rank, a thread for each
of its streams, complete events ("X") with times in µs, flow events ("s", "t", "f") along each message, a counter ("C")
of memory. A process has its rank's number; numbers of threads are unique among all processes and differ from those of
processes, since Perfetto takes threads of one number for one thread. Times are whole nanoseconds, so that rounding lets
nothing overlap what comes before it.

Whoever records a run gives spans and counters; names of threads and the flows follow from the spans.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trigrid.errors import Problem, Refused
from trigrid.plan.simulate import Simulation
from trigrid.schedule import Action, Kind, result, sends_to

COMPUTE, COLLECTIVES = "compute", "collectives"
FIRST_THREAD = 10**7
"""Above every rank."""
NAMES = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight backward"}


class TraceSpan(NamedTuple):
    """stream: "compute", "P2P to 3" or another name of what runs one thing at a time. kind: "F", "B", "I" or "W" with
    stage and microbatch, in a P2P stream "F" or "B" of what is sent; or another word, without them."""

    rank: int
    stream: str
    kind: str
    stage: int | None
    microbatch: int | None
    start_s: float
    stop_s: float


class Held(NamedTuple):
    """bytes that `rank` holds from time_s on."""

    rank: int
    time_s: float
    bytes: int


@dataclass(frozen=True)
class Trace:
    """A timeline of one step or several. ranks: what each is called; facts: what the file says about itself."""

    spans: Sequence[TraceSpan]
    memory: Sequence[Held]
    ranks: Mapping[int, str]
    facts: Mapping[str, object] = field(default_factory=dict)


def p2p(rank: int) -> str:
    """The stream of messages to `rank`."""
    return f"P2P to {rank}"


def write_trace(trace: Trace, path: Path) -> None:
    """Write `trace` to `path`, aside first so that none is ever half there. Raises Refused where that fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(trace_text(trace))
        aside.replace(path)
    except OSError as error:
        raise Refused([Problem("trace", path, f"cannot be written: {error.strerror}")]) from None


def trace_text(trace: Trace) -> str:
    """The file."""
    facts = json.dumps(dict(trace.facts), allow_nan=False)
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in trace_events(trace))
    return f'{{"displayTimeUnit": "ms", "otherData": {facts}, "traceEvents": [\n{events}\n]}}\n'


def trace_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """The events of the file."""
    threads: dict[tuple[int, str], int] = {}
    for rank, name in trace.ranks.items():
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        streams = sorted({span.stream for span in trace.spans if span.rank == rank}, key=lambda s: (s != COMPUTE, s))
        for number, stream in enumerate(streams):
            tid = threads[rank, stream] = FIRST_THREAD + len(threads)
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": stream}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": number}}
    for span in trace.spans:
        numbered = span.stage is not None
        yield {
            "ph": "X",
            "name": f"{span.kind}{span.stage}.{span.microbatch}" if numbered else span.kind,
            "cat": span.stream.partition(" ")[0],
            "pid": span.rank,
            "tid": threads[span.rank, span.stream],
            "ts": _us(_ns(span.start_s)),
            "dur": _us(_ns(span.stop_s) - _ns(span.start_s)),
            "args": {"kind": NAMES.get(span.kind, span.kind), "stage": span.stage, "microbatch": span.microbatch}
            if numbered
            else {},
        }
    yield from _flows(trace.spans, threads)
    for rank, time_s, size in trace.memory:
        yield {"ph": "C", "name": "memory", "pid": rank, "ts": _us(_ns(time_s)), "args": {"bytes": size}}


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _us(time_ns: int) -> float:
    return time_ns / 1000


def _flows(spans: Iterable[TraceSpan], threads: Mapping[tuple[int, str], int]) -> Iterator[dict[str, Any]]:
    """From each action whose result is sent, over the message, to the action that it is for; a flow event belongs to
    the span that it lies in, so each has the time of its span's begin."""
    made: dict[Action, list[TraceSpan]] = {}
    sent: dict[Action, list[TraceSpan]] = {}
    used: dict[Action, list[TraceSpan]] = {}
    for span in spans:
        if span.stage is None or span.microbatch is None:
            continue
        name = result(Action(Kind(span.kind), span.stage, span.microbatch))
        if span.stream != COMPUTE:
            sent.setdefault(name, []).append(span)
        elif span.kind != Kind.WEIGHT:
            made.setdefault(name, []).append(span)
            source = span.stage - 1 if name.kind is Kind.FORWARD else span.stage + 1
            used.setdefault(name._replace(stage=source), []).append(span)
    # In a trace of several steps the n-th message of a name is that of the n-th of them.
    whole = [ends for name in sent for ends in zip(made.get(name, ()), sent[name], used.get(name, ()), strict=False)]
    for number, (maker, message, user) in enumerate(whole):
        between = [("t", message)] if message.stop_s > message.start_s else []
        for phase, span in (("s", maker), *between, ("f", user)):
            event = {
                "ph": phase,
                "id": number,
                "name": "message",
                "cat": "P2P",
                "pid": span.rank,
                "tid": threads[span.rank, span.stream],
                "ts": _us(_ns(span.start_s)),
            }
            yield {**event, "bp": "e"} if phase == "f" else event


def simulation_trace(simulation: Simulation) -> Trace:
    """The whole step of `simulation`: what comes before the pipeline, the pipeline, and what comes after."""
    timeline, beyond = simulation.timeline, simulation.stages.beyond_s
    order, schedule, ranks = timeline.order, simulation.schedule, range(len(timeline.busy_s))
    begin = beyond["gather"]
    spans: list[TraceSpan] = []
    free: dict[int, float] = {}
    delays = order.delays(simulation.durations)
    for (rank, action, start, end), link, delay in zip(timeline.spans, order.links, delays, strict=True):
        kind, stage, m = action
        spans.append(TraceSpan(rank, COMPUTE, str(kind), stage, m, begin + start, begin + end))
        target = sends_to(schedule, action)
        if target is not None:
            leaves = max(end, free.get(link, 0.0))
            free[link] = leaves + delay
            sent = str(result(action).kind)
            spans.append(TraceSpan(rank, p2p(target), sent, stage, m, begin + leaves, begin + free[link]))
    for rank in ranks:
        at = 0.0
        for part in ("gather", "", "reduce", "tied", "optimizer", "fixed"):
            took = beyond[part] if part else timeline.step_s
            if part and took:
                spans.append(TraceSpan(rank, COLLECTIVES, part, None, None, at, at + took))
            at += took
    memory = [Held(rank, 0.0, simulation.stages.state_bytes[rank]) for rank in ranks]
    for rank in ranks:
        state = simulation.stages.state_bytes[rank]
        memory += [Held(rank, begin + time_s, state + size) for time_s, size in simulation.memory[rank]]
    stages = [[str(s) for s, holder in enumerate(schedule.placement) if holder == rank] for rank in ranks]
    names = {rank: f"pipeline rank {rank}, stage {' and '.join(mine)}" for rank, mine in enumerate(stages)}
    facts = {
        "model": simulation.job.model.name,
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "step_s": simulation.step_s,
        "memory": "state and activations under way",
    }
    return Trace(spans, memory, names, facts)
