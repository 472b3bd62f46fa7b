"""A planned step beside the one that really ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from trigrid.errors import Problem, Refused
from trigrid.plan.simulate import Simulation
from trigrid.report.console import table
from trigrid.report.plan import WIDTH
from trigrid.report.timeline import timeline_text
from trigrid.report.units import seconds
from trigrid.schedule import Order, Span, Timeline, replay
from trigrid.schedule.recorded import Recorded, read_recorded, times_of


@dataclass(frozen=True)
class Comparison:
    """planned: with the planner's durations; replayed: the same schedule with the mean durations of the run; measured:
    the run's own spans, of each pipeline that was recorded, counted from its first action."""

    planned: Simulation
    replayed: Timeline
    recorded: Recorded
    measured: tuple[Timeline, ...]


def compare(planned: Simulation, run: Path) -> Comparison:
    """The step that `run`, a folder of a run of the job of `planned`, has recorded, beside it. Raises Refused where
    there is none, or it ran another schedule."""
    recorded, order = read_recorded(run), planned.timeline.order
    replayed = replay(order, times_of(recorded, planned.schedule).durations)
    return Comparison(planned, replayed, recorded, tuple(_measured(order, spans) for spans in recorded.pipelines))


def _measured(order: Order, spans: Sequence[Span]) -> Timeline:
    """The spans of one pipeline as a timeline that begins with the first of them."""
    by_action = {span.action: span for span in spans}
    if by_action.keys() != set(order.actions):
        odd = min(by_action.keys() ^ set(order.actions), key=str)
        whose = "the run" if odd in by_action else "the job's schedule"
        raise Refused([Problem("compare", str(odd), f"only {whose} has it: they are not of one schedule and batch")])
    begin_s = min(span.start_s for span in spans)
    mine = [by_action[action] for action in order.actions]
    busy_s = [0.0] * len(order.schedule.ranks)
    for rank, span in zip(order.ranks, mine, strict=True):
        busy_s[rank] += span.end_s - span.start_s
    ends_s = tuple(span.end_s - begin_s for span in mine)
    return Timeline(order, tuple(span.start_s - begin_s for span in mine), ends_s, max(ends_s), tuple(busy_s))


def comparison_text(comparison: Comparison, width: int) -> str:
    """The picture of the run, the figures of each rank beside the planned ones, and what explains the difference."""
    planned, replayed, measured = comparison.planned.timeline, comparison.replayed, comparison.measured[0]
    rows = [
        [
            str(rank),
            *(seconds(t.busy_s[rank]) for t in (planned, replayed, measured)),
            *(f"{t.idle_shares[rank]:.1%}" for t in (planned, replayed, measured)),
        ]
        for rank in range(len(measured.busy_s))
    ]
    kinds = ("planned", "replayed", "measured")
    header = ["rank", *(f"busy {kind}" for kind in kinds), *(f"idle {kind}" for kind in kinds)]
    lines = [f"  {line.rstrip()}" for line in table(header, rows).splitlines()]
    words = wrap(explained(comparison), WIDTH)
    return "\n".join(
        [
            f"measured, step {comparison.recorded.step} of the run: {seconds(measured.step_s)}",
            timeline_text(measured, width),
            "",
            *lines,
            "",
            *words,
        ]
    )


def explained(comparison: Comparison) -> str:
    """What the difference between planned and measured is made of, in words."""
    planned, replayed = comparison.planned.timeline, comparison.replayed
    ends = [timeline.step_s for timeline in comparison.measured]
    text = (
        f"The pipeline takes {seconds(ends[0])}; the planner said {seconds(planned.step_s)} "
        f"on {comparison.planned.job.cluster.gpu}. Played with the run's own "
        f"mean durations the same schedule takes {seconds(replayed.step_s)}: that part of the difference is how long "
        f"actions take, and the rest, {(ends[0] - replayed.step_s) / ends[0]:+.1%} of what was measured, is how much "
        "they vary and what messages wait for."
    )
    if len(ends) > 1:
        text += f" The slowest of the {len(ends)} pipelines recorded takes {seconds(max(ends))}."
    return text


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The figures of the text."""
    timelines = {
        "planned": comparison.planned.timeline,
        "replayed": comparison.replayed,
        "measured": comparison.measured[0],
    }
    return {
        "step": comparison.recorded.step,
        "pipelines_s": [timeline.step_s for timeline in comparison.measured],
        **{
            name: {
                "pipeline_s": timeline.step_s,
                "bubble_ratio": timeline.bubble_ratio,
                "idle_share": timeline.idle_share,
                "ranks": [
                    {"busy_s": busy, "idle_share": idle}
                    for busy, idle in zip(timeline.busy_s, timeline.idle_shares, strict=True)
                ],
            }
            for name, timeline in timelines.items()
        },
    }
