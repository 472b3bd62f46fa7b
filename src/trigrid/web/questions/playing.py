"""`timeline`: a step played, to be drawn."""

from __future__ import annotations

from dataclasses import dataclass

from trigrid.errors import Problem, Refused
from trigrid.plan.simulate import Simulation, simulate
from trigrid.report.units import seconds
from trigrid.schedule import Timeline
from trigrid.web.questions.draft import Draft, draft
from trigrid.web.questions.limits import COMMAND, MOST_SPANS, spans
from trigrid.web.questions.state import State


@dataclass(frozen=True, kw_only=True)
class TimelineInput:
    """What is played."""

    state: State
    """The page's state."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one pipeline rank does, as columns of equal length, in order."""

    start_s: list[float]
    """When each action starts."""
    end_s: list[float]
    """When it ends."""
    kind: list[str]
    """F forward, B backward, I of the input alone, W of the weights alone."""
    stage: list[int]
    """Of the pipeline."""
    microbatch: list[int]
    """Its number."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """What one pipeline rank holds, as columns of equal length: from each time on."""

    t_s: list[float]
    """When it changes."""
    bytes: list[int]
    """State, and microbatches under way."""


@dataclass(frozen=True, slots=True)
class TimelineAnswer:
    """A pipeline's step. What comes before and after it in the step is in `plan`."""

    ranks: int
    """Pipeline ranks."""
    step_s: float
    """Of the whole step, but for waiting for slower pipelines."""
    pipeline_s: float
    """Of the pipeline, which is drawn."""
    beyond_s: dict[str, float]
    """Of the step before and after the pipeline, by part."""
    microbatches: int
    """Of the step."""
    bubble_ratio: float
    """Idle ÷ busy time of all ranks."""
    idle_share: float
    """Idle ÷ pipeline time of all ranks."""
    idle_shares: list[float]
    """The same by rank."""
    stages_of: list[list[int]]
    """Stages of each rank."""
    rows: list[Row]
    """By rank."""
    memory: list[MemoryRow]
    """By rank."""
    ceiling_bytes: int
    """What an accelerator has."""
    words: str
    """The step in a sentence."""


def played(drafted: Draft) -> Simulation:
    """The step of a draft, played. Raises Refused, also where it is too long to draw."""
    job, software = drafted.asked
    if (many := spans(job)) > MOST_SPANS:
        reason = f"a timeline of {many:,} actions is more than the {MOST_SPANS:,} that this page draws"
        hint = COMMAND.replace("trigrid plan", "trigrid simulate")
        raise Refused([Problem("timeline", f"{many:,} actions", f"{reason}; {hint}")])
    return simulate(job, software)


def rows_of(line: Timeline) -> list[Row]:
    """What each pipeline rank does."""
    rows = [Row([], [], [], [], []) for _ in line.busy_s]
    for rank, (kind, stage, m), start_s, end_s in line.spans:
        row = rows[rank]
        row.start_s.append(start_s)
        row.end_s.append(end_s)
        row.kind.append(str(kind))
        row.stage.append(stage)
        row.microbatch.append(m)
    return rows


def timeline(asked: TimelineInput) -> TimelineAnswer:
    """The played step of a state."""
    drafted = draft(asked.state)
    made = played(drafted)
    line, placement = made.timeline, made.schedule.placement
    ranks = range(len(line.busy_s))
    rows = rows_of(line)
    state = made.stages.state_bytes
    return TimelineAnswer(
        ranks=len(rows),
        step_s=made.step_s,
        pipeline_s=line.step_s,
        beyond_s=dict(made.stages.beyond_s),
        microbatches=made.schedule.microbatches,
        bubble_ratio=line.bubble_ratio,
        idle_share=line.idle_share,
        idle_shares=list(line.idle_shares),
        stages_of=[[stage for stage, holder in enumerate(placement) if holder == rank] for rank in ranks],
        rows=rows,
        memory=[
            MemoryRow(
                [0.0, *(t for t, _ in made.memory[rank])],
                [state[rank], *(state[rank] + b for _, b in made.memory[rank])],
            )
            for rank in ranks
        ],
        ceiling_bytes=drafted.plan.ceiling_bytes,
        words=(
            f"{made.schedule.name}, {len(rows)} ranks, {made.schedule.stages} stages, {made.schedule.microbatches} "
            f"microbatches: pipeline {seconds(line.step_s)} of a step of {seconds(made.step_s)}, bubble_ratio "
            f"{line.bubble_ratio:.1%} (idle ÷ busy), idle_share {line.idle_share:.1%} (idle ÷ pipeline)"
        ),
    )
