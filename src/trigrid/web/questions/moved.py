"""States a step away from another: in the layout of a candidate, or with another value of a key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trigrid.plan.layouts import job_of
from trigrid.plan.plan import judged
from trigrid.plan.setup import Setup
from trigrid.plan.step import Step
from trigrid.report.search import layout_text
from trigrid.spec.job import Job
from trigrid.web.questions.draft import with_dp
from trigrid.web.questions.moves import get
from trigrid.web.questions.state import State, Value

OF_A_LAYOUT = (
    *("parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep", "parallel.dp_replicate", "parallel.zero"),
    *("parallel.gather", "parallel.reduce", "parallel.schedule", "parallel.virtual_stages", "parallel.recompute"),
    *("batch.micro_batch",),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its price."""

    state: State
    """The page's state with it."""
    words: str
    """The layout in one short line."""
    step_s: float
    """Seconds of a step."""
    tokens_per_s: float
    """Of all GPUs."""
    total_bytes: int
    """Of the fullest stage, as the device sees it."""
    verdict: str
    """SAFE, TIGHT or DOES NOT FIT."""


def in_layout(state: State, job: Job, setup: Setup, gpus: int) -> State:
    """`state` in the layout of `setup`, which is one of `job`, on at most `gpus` GPUs."""
    moved = job_of(job, setup)
    values = {key: value for key, value in state.values.items() if key not in (*OF_A_LAYOUT, "parallel.stage_layers")}
    values.pop("parallel.dp", None)
    for key in OF_A_LAYOUT:
        if key != "parallel.ep" or job.model.experts:
            values[key] = _plain(get(moved, key))
    if setup.stage_layers:
        values["parallel.stage_layers"] = list(setup.stage_layers)
    if with_dp(moved, gpus).parallel.dp != setup.dp or state.gpus is None:
        values["parallel.dp"] = setup.dp
    return replace(state, gpus=gpus, values=values)


def with_value(state: State, key: str, value: Any) -> State:
    """`state` with another value of `key`."""
    return replace(state, values={**state.values, key: _plain(value)})


def candidate(state: State, setup: Setup, step_s: float, total_bytes: float, step: Step) -> Candidate:
    """A priced layout, which `state` has."""
    tokens = setup.dp * setup.micro_batch * setup.microbatches * setup.sequence
    machine = step.machine
    verdict = judged(total_bytes, machine.gpu.hbm_bytes, machine.values["interval.memory"])[1]
    return Candidate(state, layout_text(setup), step_s, tokens / step_s, round(total_bytes), verdict)


def _plain(value: Any) -> Value:
    found: Value = list(value) if isinstance(value, tuple) else value
    return found
