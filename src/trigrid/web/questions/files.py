"""`job`, `json`, `trace` and `export`: a state as files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from trigrid.job.export import export_job
from trigrid.job.writing import dump_job
from trigrid.plan.figures import memory_wall
from trigrid.plan.plan import as_json
from trigrid.report.trace import simulation_trace, trace_text
from trigrid.spec.rules import check_trainable
from trigrid.web.questions.draft import draft
from trigrid.web.questions.playing import played
from trigrid.web.questions.state import State


@dataclass(frozen=True, kw_only=True)
class JobInput:
    """Of what."""

    state: State
    """The page's state."""


@dataclass(frozen=True, kw_only=True)
class PlanFileInput:
    """Of what."""

    state: State
    """The page's state."""


@dataclass(frozen=True, kw_only=True)
class TraceInput:
    """Of what."""

    state: State
    """The page's state."""


@dataclass(frozen=True, kw_only=True)
class ExportInput:
    """Of what and for whom."""

    state: State
    """The page's state."""
    target: Literal["megatron", "torchtitan", "deepspeed"]
    """The other trainer."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to keep."""

    name: str
    """What to call it."""
    type: str
    """Its media type."""
    text: str
    """What it holds."""
    notes: list[str]
    """What is to be known of it."""


def job(asked: JobInput) -> File:
    """The job as TOML, which `trigrid plan`, `prove` and `train` read. Raises Refused for one that is not legal."""
    made, _ = draft(asked.state).asked
    notes = [f"cannot be trained yet: {told}" for told in check_trainable(made)]
    return File("job.toml", "application/toml", dump_job(made), notes)


def plan_file(asked: PlanFileInput) -> File:
    """The plan as `trigrid plan --json` prints it. Raises Refused for a layout that is not legal."""
    drafted = draft(asked.state)
    plan = drafted.plan
    training = {"tokens": drafted.tokens, **asdict(plan.training(drafted.tokens))}
    found = {**as_json(plan), "training": training, "memory_wall": memory_wall(plan), "asked": list(drafted.assumed)}
    return File("plan.json", "application/json", json.dumps(found, indent=1, allow_nan=False), [])


def trace(asked: TraceInput) -> File:
    """The played step as a trace that Perfetto opens. Raises Refused where it is too long."""
    text = trace_text(simulation_trace(played(draft(asked.state))))
    return File("trace.json", "application/json", text, ["opens in ui.perfetto.dev and chrome://tracing"])


def export(asked: ExportInput) -> File:
    """The job as arguments or configuration of another trainer. Raises Refused where that has no such layout."""
    made, _ = draft(asked.state).asked
    found = export_job(made, asked.target)
    names = {"megatron": "megatron.sh", "torchtitan": "torchtitan.toml", "deepspeed": "deepspeed.json"}
    return File(names[asked.target], "text/plain", found.text, list(found.notes))
