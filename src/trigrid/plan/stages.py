"""The stages of a job's pipeline, as whoever plays or makes a schedule needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trigrid.plan.pipeline import Chunk, durations
from trigrid.plan.setup import Setup
from trigrid.plan.software import Software, engine_software
from trigrid.plan.step import Step
from trigrid.schedule import Durations
from trigrid.spec.job import Job

BEYOND = ("gather", "reduce", "tied", "optimizer", "fixed")
"""Parts of a step before and after its pipeline."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """placement: pipeline rank of each stage. chunks: seconds of each with their parts. forward_bytes, weight_bytes: by
    stage and microbatch, as in `schedule.peak_bytes`; state_bytes: by rank, between steps. beyond_s: by part."""

    setup: Setup
    placement: tuple[int, ...]
    durations: Durations
    chunks: tuple[Chunk, ...]
    forward_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    beyond_s: Mapping[str, float]


def step_of(job: Job, software: Software | None = None) -> Step:
    """What prices steps of `job`. software: this project's engine where it is left out."""
    # plan.py imports auto.py, which needs this file.
    from trigrid.plan.plan import number_format, step_for

    return step_for(job.model, job.cluster, software or engine_software(job), number_format(job))


def stages_of(step: Step, setup: Setup) -> Stages:
    """The stages of `setup`, in a schedule that the planner knows by name."""
    memory, timed = step.memory, step.time(setup)
    forward, weight = [0] * (setup.pp * setup.virtual), [0] * (setup.pp * setup.virtual)
    for held in memory.held(setup):
        for stage, kinds in zip(held.stages, held.chunks, strict=True):
            kept, _, later = memory.chunk(setup.at(stage), setup.cut, kinds)
            forward[stage], weight[stage] = round(kept), round(later)
    message = timed.links_s["p2p"] / (2 * setup.microbatches * setup.virtual)
    chunks = step.pipeline(setup).stages
    return Stages(
        setup=setup,
        placement=tuple(setup.holder(stage) for stage in range(len(chunks))),
        durations=durations(setup, chunks, message),
        chunks=chunks,
        forward_bytes=tuple(forward),
        weight_bytes=tuple(weight),
        state_bytes=tuple(sum(memory.state(setup, rank)[0]) for rank in range(setup.pp)),
        beyond_s={part: timed.parts_s[part] for part in BEYOND},
    )
