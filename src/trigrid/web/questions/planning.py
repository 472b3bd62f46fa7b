"""`plan`: everything that a turn of a dial asks for, in one answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trigrid.errors import Refused
from trigrid.plan.figures import figures, memory_wall
from trigrid.plan.plan import Plan, as_json, make_plan
from trigrid.plan.stages import step_of
from trigrid.report.plan import (
    AXIS_OF_PART,
    MOMENTS,
    PART_NAMES,
    answer_rows,
    fullest_text,
    grid_rows,
    policy_text,
    tiers,
    title,
    verdict,
    wall_text,
)
from trigrid.web.questions.answers import Figure, Problem, problem
from trigrid.web.questions.controls import Control, controls
from trigrid.web.questions.draft import Draft, draft
from trigrid.web.questions.link import command_of, query_of
from trigrid.web.questions.moves import get
from trigrid.web.questions.shapes import Shape, shape
from trigrid.web.questions.state import State

SAID = (
    *("parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep", "parallel.dp_replicate", "parallel.zero"),
    *("parallel.schedule", "parallel.virtual_stages", "parallel.recompute"),
    *("batch.micro_batch", "batch.sequence", "batch.global_batch", "cluster.gpu"),
)
"""Keys that a whole state has: what a plan on the command line would otherwise search or assume."""


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """What is planned."""

    state: State
    """The page's state."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Units of one kind on a pipeline rank."""

    kind: str
    """embedding, head, or the kind of block."""
    count: int
    """How many."""
    parameters: int
    """Of all of them, on one tensor-parallel rank."""
    state_bytes: int
    """Weights, masters, gradients and moments of all of them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline rank; its memory stands in plan.memory.stages."""

    stage: int
    """Its number."""
    layers: int
    """Its blocks."""
    words: str
    """What it holds."""
    moment: str
    """When it needs most."""
    units: list[Unit]
    """What it is made of."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the step."""

    name: str
    """As in plan.time.parts_s."""
    label: str
    """For people."""
    seconds: float
    """Of the step."""
    share: float
    """Of the step's time."""
    link_label: str
    """The network that it crosses; empty: none."""
    link_busy_s: float
    """Seconds for which that network is busy with it."""


@dataclass(frozen=True, slots=True)
class Training:
    """What the tokens take, every GPU productive all the time."""

    tokens: float
    """How many."""
    seconds: float
    """Of wall time."""
    energy_kwh: float
    """Of the building."""
    cost: float | None
    """In the price's currency; null without a price."""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """A plan; with `problems` there is none, and the controls show the way back."""

    state: State
    """As it was given, with what a whole state has besides."""
    problems: list[Problem]
    """Why there is no plan."""
    controls: list[Control]
    """The dials; none where not even a model is described."""
    query: str
    """The state as the part of a URL after "#"."""
    command: str
    """The command line that prints the same plan."""
    shape: Shape | None
    """The model."""
    dp: int
    """Data-parallel degree: what is left of the GPUs beside the other degrees, and divides the batch."""
    microbatches: int
    """Of each data-parallel rank and step."""
    world: int
    """GPUs that are used."""
    spare_gpus: int
    """GPUs that are not."""
    assumed: list[str]
    """What the state leaves open, in sentences."""
    plan: dict[str, Any] | None
    """By the contract trigrid.plan/1, as `trigrid plan --json` prints it."""
    verdict: str
    """SAFE, TIGHT or DOES NOT FIT; empty without a plan."""
    headline: str
    """The same in a sentence, with the model and the GPUs."""
    words: dict[str, str]
    """Sentences as the command line prints them, by what they tell."""
    figures: dict[str, Figure]
    """Every figure that `explain` knows."""
    stages: list[Stage]
    """Pipeline ranks."""
    parts: list[Part]
    """Of the step, those that take time."""
    memory_wall: dict[str, float]
    """The state of the whole model against one server."""
    training: Training | None
    """The whole training."""


def plan(asked: PlanInput) -> PlanAnswer:
    """The plan of a state, or why there is none."""
    try:
        drafted = draft(asked.state)
    except Refused as refused:
        return _nothing(asked.state, [problem(told) for told in refused.problems])
    if drafted.problems:
        return _refused(drafted, [problem(told) for told in drafted.problems])
    try:
        return _planned(drafted, make_plan(drafted.job, drafted.software))
    except Refused as refused:
        return _refused(drafted, [problem(told) for told in refused.problems])


def whole(drafted: Draft) -> State:
    """The state of a draft with everything that a whole state has."""
    job = drafted.job
    said = {key: get(job, key) for key in SAID if key != "parallel.ep" or job.model.experts}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in said.items()}
    return replace(drafted.state, gpus=drafted.gpus, values={**plain, **drafted.state.values})


def _nothing(state: State, problems: list[Problem]) -> PlanAnswer:
    """Where no model is described."""
    return PlanAnswer(
        state=state,
        problems=problems,
        controls=[],
        query=query_of(state),
        command=command_of(state),
        shape=None,
        dp=0,
        microbatches=0,
        world=0,
        spare_gpus=0,
        assumed=[],
        plan=None,
        verdict="",
        headline=problems[0].reason,
        words={},
        figures={},
        stages=[],
        parts=[],
        memory_wall={},
        training=None,
    )


def _refused(drafted: Draft, problems: list[Problem]) -> PlanAnswer:
    """Where there is a model, and something is not legal."""
    state, layout = whole(drafted), drafted.job.parallel
    first = problems[0]
    return replace(
        _nothing(state, problems),
        controls=controls(drafted),
        shape=shape(drafted.job.model),
        dp=layout.dp,
        microbatches=drafted.job.batch.microbatches(layout),
        world=layout.world,
        assumed=list(drafted.assumed),
        headline=f"NOT LEGAL: {first.key} = {first.value}: {first.reason}",
    )


def _planned(drafted: Draft, made: Plan) -> PlanAnswer:
    state, tokens = whole(drafted), drafted.tokens
    trained = made.training(tokens)
    return PlanAnswer(
        state=state,
        problems=[],
        controls=controls(drafted),
        query=query_of(state),
        command=command_of(state),
        shape=shape(made.job.model),
        dp=made.setup.dp,
        microbatches=made.setup.microbatches,
        world=made.setup.world,
        spare_gpus=drafted.gpus - made.setup.world,
        assumed=list(drafted.assumed),
        plan=as_json(made),
        verdict=verdict(made),
        headline=title(made),
        words=_words(made, tokens),
        figures={name: Figure(value, unit) for name, (value, unit) in figures(made, tokens).items()},
        stages=_stages(made),
        parts=_parts(made),
        memory_wall=memory_wall(made),
        training=Training(tokens, trained.seconds, trained.energy_kwh, trained.cost),
    )


def _words(made: Plan, tokens: float) -> dict[str, str]:
    rows = dict(answer_rows(made, tokens))
    # Its name on the command line is the number of tokens.
    named = zip(("step", "throughput", "mfu", "training", "goodput"), rows.values(), strict=True)
    return {
        **dict(named),
        "memory_wall": wall_text(made),
        "policy": policy_text(made.software.policy),
        "fullest": fullest_text(made.fullest),
        **dict(grid_rows(made)),
    }


def _stages(made: Plan) -> list[Stage]:
    setup, memory = made.setup, step_of(made.job, made.software).memory
    split = setup.layers_of(made.job.model.layers)
    before = [sum(split[:stage]) for stage in range(len(split))]
    found = []
    for rank, held in enumerate(memory.held(setup)):
        blocks = [_span(before[s], before[s] + split[s] - 1) for s in held.stages if split[s]]
        layers = [f"layers {', '.join(blocks)}"] if blocks else []
        words = ", ".join([*(["embedding"] if held.first else []), *layers, *(["head"] if held.last else [])])
        units = []
        for kind, count in held.parts:
            state, parameters = memory.state_of(setup, ((kind, count),))
            units.append(Unit(kind, count, parameters, sum(state)))
        moment = MOMENTS[made.stages[rank].memory.use.moment]
        found.append(Stage(rank, held.layers, words, moment, units))
    return found


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _parts(made: Plan) -> list[Part]:
    time, crossed = made.time, tiers(made)
    return [
        Part(
            name=name,
            label=PART_NAMES[name],
            seconds=spent,
            share=spent / time.step_s,
            link_label=crossed.get(AXIS_OF_PART.get(name, name), "") if time.links_s.get(name) else "",
            link_busy_s=time.links_s.get(name, 0.0),
        )
        for name, spent in time.parts_s.items()
        if spent
    ]
