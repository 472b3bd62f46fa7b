"""`explain`: a figure and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trigrid.errors import Problem, Refused
from trigrid.plan import explain as explaining
from trigrid.plan.plan import Plan
from trigrid.web.questions.draft import draft
from trigrid.web.questions.labels import label
from trigrid.web.questions.state import State

Plain = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class ExplainInput:
    """Which figure of which plan."""

    state: State
    """The page's state."""
    figure: str
    """Its name, as in the figures of `plan`."""
    stage: int | None = None
    """Whose memory.… is meant; left out: the fullest stage's."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a figure is made of."""

    figure: str
    """Its name."""
    label: str
    """Its name for people."""
    value: float
    """The figure."""
    unit: str
    """Of what."""
    formula: str
    """In words."""
    inputs: dict[str, Plain]
    """What the formula takes, by the names in it."""
    source: str
    """Paper, file or definition."""


def explain(asked: ExplainInput) -> Explanation:
    """Formula, inputs and source of a figure. Raises Refused for a figure or a stage that is none."""
    drafted = draft(asked.state)
    found = explaining.explain(_seen_from(drafted.plan, asked.stage), asked.figure, drafted.tokens)
    inputs = {name: value if isinstance(value, Plain) else str(value) for name, value in found.inputs.items()}
    return Explanation(found.figure, label(found.figure), found.value, found.unit, found.formula, inputs, found.source)


def _seen_from(plan: Plan, stage: int | None) -> Plan:
    """`plan` with one stage only, whose memory its figures are then of."""
    if stage is None:
        return plan
    if not 0 <= stage < len(plan.stages):
        raise Refused([Problem("stage", stage, f"must be from 0 to {len(plan.stages) - 1}", (len(plan.stages) - 1,))])
    held = plan.stages[stage]
    facts = {**plan.facts, "parameters_of_the_stage": held.memory.use.parameters}
    return replace(plan, stages=(held,), facts=facts)
