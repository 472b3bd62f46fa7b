"""Timelines as the page draws them, and ranks that hold up others, from the step that a run has recorded."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from trigrid.report.log import SLOW
from trigrid.report.timelines import Comparison
from trigrid.schedule import Timeline
from trigrid.schedule.recorded import Recorded
from trigrid.web.questions.answers import plain
from trigrid.web.questions.playing import rows_of

Held = Mapping[int, Sequence[tuple[float, int]]]
"""By rank of the world (second, bytes from then on)."""


def lanes(timeline: Timeline, memory: Sequence[Sequence[tuple[float, int]]], ceiling_bytes: int) -> dict[str, Any]:
    """A lane of actions for each pipeline rank, in columns, and the bytes it holds over time."""
    return {
        "step_s": timeline.step_s,
        "bubble_ratio": timeline.bubble_ratio,
        "idle_share": timeline.idle_share,
        "idle_shares": list(timeline.idle_shares),
        "rows": plain(rows_of(timeline)),
        "memory": [{"t_s": [t for t, _ in held], "bytes": [size for _, size in held]} for held in memory],
        "ceiling_bytes": ceiling_bytes,
    }


def recorded_memory(trace: Path) -> Held:
    """What each rank held, as the counters of a recorded step tell it; empty where the device could not say."""
    held: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] == "C" and event["name"] == "memory":
            held[int(event["pid"])].append((event["ts"] / 1e6, int(event["args"]["bytes"])))
    return held


def measured_lanes(comparison: Comparison, held: Held, ceiling_bytes: int) -> list[dict[str, Any]]:
    """The pipelines that were recorded, each from its first action on."""
    found = []
    for timeline, spans in zip(comparison.measured, comparison.recorded.pipelines, strict=True):
        begin_s = min(span.start_s for span in spans)
        placement = timeline.order.schedule.placement
        world = {placement[span.action.stage]: span.rank for span in spans}
        memory = [
            [(max(0.0, t - begin_s), size) for t, size in held.get(world[rank], ())]
            for rank in range(len(timeline.busy_s))
        ]
        told = lanes(timeline, memory, ceiling_bytes)
        found.append(told | {"ranks": [world[rank] for rank in range(len(timeline.busy_s))]})
    return found


def straggling(recorded: Recorded) -> list[dict[str, Any]]:
    """Of each rank that was recorded: seconds in which it computed, the mean of the others with the same stages, how
    many times that is, 1 where it is alone, and whether it holds them up."""
    busy: dict[int, float] = defaultdict(float)
    stages: dict[int, set[int]] = defaultdict(set)
    for span in (span for pipeline in recorded.pipelines for span in pipeline):
        busy[span.rank] += span.end_s - span.start_s
        stages[span.rank].add(span.action.stage)
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(busy):
        alike[tuple(sorted(stages[rank]))].append(rank)
    found = []
    for mine, ranks in alike.items():
        for rank in ranks:
            usual = fmean([busy[other] for other in ranks if other != rank] or [busy[rank]])
            factor = busy[rank] / usual if usual else 1.0
            figures = {"busy_s": busy[rank], "usual_s": usual, "factor": factor, "slow": factor > SLOW}
            found.append({"rank": rank, "stages": list(mine)} | figures)
    return sorted(found, key=lambda told: told["rank"])
