"""The timeline of a step that really ran, from the trace that `trigrid train --trace` leaves in a run's folder."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trigrid.errors import Problem, Refused
from trigrid.schedule.actions import Action, Kind, Schedule, needs, result
from trigrid.schedule.replay import Durations, Span
from trigrid.schedule.times import Times

NAME = "trace.json"
NAMED = re.compile(r"([FBIW])(\d+)\.(\d+)")


@dataclass(frozen=True)
class Recorded:
    """pipelines: the actions of each pipeline that was recorded, by time; Span.rank is the rank's number in the world.
    step_s: from the step's begin to the end of its update, of the slowest rank; step: its number in the run."""

    pipelines: tuple[tuple[Span, ...], ...]
    step_s: float
    step: int


def read_recorded(path: Path) -> Recorded:
    """The timeline in `path`, a run's folder or the file itself. Raises Refused where there is none."""
    file = path / NAME if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        step, events = int(content["otherData"]["step"]), content["traceEvents"]
        computed = [e for e in events if e["ph"] == "X" and e["cat"] == "compute"]
        spans = [span for event in computed if (span := _span(event)) is not None]
        ends = [(event["ts"] + event["dur"]) / 1e6 for event in computed]
    except OSError as error:
        reason = f"cannot be read: {error.strerror}; `trigrid train JOB --trace STEP` writes it"
        raise Refused([Problem("run", file, reason)]) from None
    except (ValueError, KeyError, TypeError):
        raise Refused([Problem("run", file, "is no trace of a training step")]) from None
    if not spans:
        raise Refused([Problem("run", file, "has no action of a pipeline")])
    return Recorded(_pipelines(spans), max(ends), step)


def _span(event: dict[str, Any]) -> Span | None:
    match = NAMED.fullmatch(event["name"])
    if match is None:
        return None
    kind, stage, m = match.groups()
    start_s = event["ts"] / 1e6
    return Span(event["pid"], Action(Kind(kind), int(stage), int(m)), start_s, start_s + event["dur"] / 1e6)


def _pipelines(spans: Iterable[Span]) -> tuple[tuple[Span, ...], ...]:
    """Ranks in their order: the n-th that holds a stage is in the n-th pipeline."""
    ranks: dict[int, list[int]] = defaultdict(list)
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.rank, s.start_s)):
        by_rank[span.rank].append(span)
    for rank, mine in by_rank.items():
        ranks[min(span.action.stage for span in mine)].append(rank)
    count = min(map(len, ranks.values()))
    chosen = [[rank for same in ranks.values() for rank in same[number : number + 1]] for number in range(count)]
    return tuple(tuple(sorted((s for rank in mine for s in by_rank[rank]), key=lambda s: s.start_s)) for mine in chosen)


def times_of(recorded: Recorded, schedule: Schedule) -> Times:
    """Mean seconds of each kind of action by stage, and of each boundary the shortest time from the end of an action to
    the begin of the one that needs its result: what a message takes when nobody else is late.

    schedule: of the job that ran. Raises Refused where a stage of it was not recorded.
    """
    took: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    passed: dict[int, list[float]] = defaultdict(list)
    for spans in recorded.pipelines:
        ends = {result(span.action): span.end_s for span in spans}
        for span in spans:
            took[span.action.kind, span.action.stage].append(span.end_s - span.start_s)
            need = needs(schedule, span.action)
            if need is not None and need in ends:
                passed[min(need.stage, span.action.stage)].append(max(0.0, span.start_s - ends[need]))

    def mean(kind: Kind, stage: int) -> float:
        return fmean(took[kind, stage]) if took[kind, stage] else 0.0

    every = range(schedule.stages)
    if missing := [stage for stage in every if not took[Kind.FORWARD, stage]]:
        reason = f"has no forward of stage {missing[0]}: it is of another layout"
        raise Refused([Problem("run", f"step {recorded.step}", reason)])
    halves = [mean(Kind.INPUT, stage) + mean(Kind.WEIGHT, stage) for stage in every]
    durations = Durations(
        forward_s=tuple(mean(Kind.FORWARD, stage) for stage in every),
        backward_s=tuple(mean(Kind.BACKWARD, stage) or halves[stage] for stage in every),
        input_s=tuple(mean(Kind.INPUT, stage) or mean(Kind.BACKWARD, stage) for stage in every),
        weight_s=tuple(mean(Kind.WEIGHT, stage) for stage in every),
        p2p_s=tuple(min(passed[stage], default=0.0) for stage in every[:-1]),
    )
    return Times(durations, all(took[Kind.INPUT, stage] for stage in every))
