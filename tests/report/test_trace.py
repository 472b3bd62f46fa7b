"""Traces: the structure that the Trace Event Format prescribes, and what is in it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from trigrid.errors import Refused
from trigrid.job import load_job
from trigrid.plan.simulate import Simulation, simulate
from trigrid.report.trace import COMPUTE, Held, Trace, TraceSpan, p2p, simulation_trace, trace_events, write_trace
from trigrid.schedule import channels

JOB = Path(__file__).parents[2] / "examples" / "llama3-405b.toml"
# Chromium's Trace Event Format: the keys that each phase must have beside ph and pid.
REQUIRED = {
    "X": {"name", "cat", "tid", "ts", "dur", "args"},
    "M": {"name", "args"},
    "s": {"name", "cat", "tid", "ts", "id"},
    "t": {"name", "cat", "tid", "ts", "id"},
    "f": {"name", "cat", "tid", "ts", "id", "bp"},
    "C": {"name", "ts", "args"},
}


def simulation(*flags: str) -> Simulation:
    size = ["--pp", "4", "--dp", "2", "--global-batch", "16", "--model.name", "llama3-70b"]
    return simulate(load_job(JOB, [*size, *flags], env={}))


FLAGS = [
    (),
    ("--schedule", "zb-h1"),
    ("--schedule", "zbv", "--virtual", "2"),
    ("--schedule", "interleaved", "--virtual", "2"),
    ("--pp", "1", "--parallel.order", '["dp", "pp", "cp", "tp"]'),
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_a_trace_is_as_the_format_prescribes(flags: tuple[str, ...], tmp_path: Path) -> None:
    played = simulation(*flags)
    path = tmp_path / "trace.json"
    write_trace(simulation_trace(played), path)
    file = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert set(file) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert file["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = file["traceEvents"]
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int)
        assert "ts" not in event or event["ts"] >= 0
    _threads_do_one_thing_at_a_time_and_have_names(events)
    _flows_begin_and_end_in_spans(events)
    ranks = len(played.timeline.busy_s)
    assert {event["pid"] for event in events} == set(range(ranks))
    assert Counter(e["ph"] for e in events)["s"] == sum(map(len, channels(played.schedule).values()))
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["pid"] for event in counters} == set(range(ranks))
    for rank in range(ranks):
        mine = [event["args"]["bytes"] for event in counters if event["pid"] == rank]
        assert mine[0] == mine[-1] == played.stages.state_bytes[rank] < max(mine)
    last = max(event["ts"] + event.get("dur", 0) for event in events if event["ph"] == "X")
    assert last == pytest.approx(played.step_s * 1e6, abs=0.01)
    assert file["otherData"]["step_s"] == played.step_s


def _threads_do_one_thing_at_a_time_and_have_names(events: list[dict[str, Any]]) -> None:
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            start, took = (round(1000 * event[key]) for key in ("ts", "dur"))
            assert (start / 1000, took / 1000) == (event["ts"], event["dur"])
            threads[event["pid"], event["tid"]].append((start, start + took))
    assert set(threads) == named
    # Perfetto takes a number of a thread that comes twice for one thread, and one of a process for its main thread.
    numbers = Counter(tid for _, tid in named)
    assert set(numbers.values()) == {1}
    assert not numbers.keys() & {event["pid"] for event in events}
    for spans in threads.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def _flows_begin_and_end_in_spans(events: list[dict[str, Any]]) -> None:
    """The viewer gives a flow event to the span of its thread that is open at its time."""
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            around = [
                span
                for span in spans[event["pid"], event["tid"]]
                if span["ts"] <= event["ts"] and (event["ts"] < span["ts"] + span["dur"] or not span["dur"])
            ]
            assert around, event
    for flow in flows.values():
        assert [event["ph"] for event in flow] in (["s", "t", "f"], ["s", "f"])
        assert [event["ts"] for event in flow] == sorted(event["ts"] for event in flow)
        assert flow[0]["pid"] != flow[-1]["pid"]
        assert {event["name"] for event in flow} == {"message"}


def test_a_recorded_step_is_written_in_the_same_way() -> None:
    """Two steps of two ranks as a run would record them: flows are those of the same step, other spans have none."""
    spans = []
    for step in (0.0, 10.0):
        spans += [
            TraceSpan(0, COMPUTE, "F", 0, 0, step, step + 1),
            TraceSpan(0, p2p(1), "F", 0, 0, step + 1, step + 2),
            TraceSpan(1, COMPUTE, "F", 1, 0, step + 2, step + 3),
            TraceSpan(1, COMPUTE, "B", 1, 0, step + 3, step + 5),
            TraceSpan(1, p2p(0), "B", 1, 0, step + 5, step + 5),
            TraceSpan(0, COMPUTE, "I", 0, 0, step + 5, step + 6),
            TraceSpan(0, COMPUTE, "W", 0, 0, step + 6, step + 7),
            TraceSpan(0, "collectives", "reduce", None, None, step + 7, step + 8),
        ]
    events = list(trace_events(Trace(spans, [Held(0, 0.5, 7)], {0: "rank 0", 1: "rank 1"})))
    flows = [(e["ph"], e["id"], e["pid"], e["ts"]) for e in events if e["ph"] in "stf"]
    second = 1e6
    assert flows == [
        ("s", 0, 0, 0), ("t", 0, 0, second), ("f", 0, 1, 2 * second),
        ("s", 1, 0, 10 * second), ("t", 1, 0, 11 * second), ("f", 1, 1, 12 * second),
        ("s", 2, 1, 3 * second), ("f", 2, 0, 5 * second),
        ("s", 3, 1, 13 * second), ("f", 3, 0, 15 * second),
    ]  # fmt: skip
    names = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert names[:5] == ["F0.0", "F0.0", "I0.0", "W0.0", "reduce"]
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"bytes": 7}]


def test_a_message_whose_ends_are_not_recorded_has_no_flow() -> None:
    spans = [TraceSpan(0, p2p(1), "F", 0, 0, 1.0, 2.0), TraceSpan(1, COMPUTE, "F", 1, 0, 2.0, 3.0)]
    assert [e["ph"] for e in trace_events(Trace(spans, [], {0: "a", 1: "b"})) if e["ph"] != "M"] == ["X", "X"]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"trace = .*none/t.json: cannot be written: No such file or directory"):
        write_trace(Trace([], [], {}), tmp_path / "none" / "t.json")
    assert list(tmp_path.iterdir()) == []
