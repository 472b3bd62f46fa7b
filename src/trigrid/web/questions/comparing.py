"""`compare`: two plans side by side. `measured`: a plan beside a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any, Literal

from trigrid.errors import Problem, Refused
from trigrid.plan.figures import figures
from trigrid.report.units import figures as digits
from trigrid.report.units import gib, scaled, seconds
from trigrid.web.questions.answers import written
from trigrid.web.questions.dials import DIALS
from trigrid.web.questions.draft import Draft, draft
from trigrid.web.questions.labels import label
from trigrid.web.questions.state import State

MORE_IS_BETTER = {
    *("tokens_per_s", "tokens_per_s_per_gpu", "mfu_full_attention", "mfu_causal"),
    *("goodput.productive_share", "goodput.mtbf_job_s"),
}
NEITHER = {"parameters", "goodput.interval_s", "memory.ceiling", "memory_wall.server", "memory_wall.state"}
ALIKE = 1e-9
"""Share by which figures may differ and count as the same."""


@dataclass(frozen=True, kw_only=True)
class CompareInput:
    """Two states."""

    a: State
    """The first."""
    b: State
    """The second."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure of both."""

    figure: str
    """Its name."""
    label: str
    """Its name for people."""
    unit: str
    """Of what."""
    a: float
    """Of the first."""
    b: float
    """Of the second."""
    change: float | None
    """b ÷ a − 1; null where a is 0."""
    better: Literal["a", "b"] | None
    """Which of them one would rather have; null where neither."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that has two values."""

    key: str
    """A job key, or a name of the state."""
    label: str
    """For people."""
    a: str
    """Of the first."""
    b: str
    """Of the second."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two plans."""

    rows: list[Pair]
    """Figures that both have."""
    differs: list[Difference]
    """What they differ in."""


def compare(asked: CompareInput) -> Comparison:
    """The figures of two plans and what the two differ in. Raises Refused where either is not to be planned."""
    a, b = _drafted("a", asked.a), _drafted("b", asked.b)
    ours, theirs = figures(a.plan, a.tokens), figures(b.plan, b.tokens)
    rows = [_pair(name, unit, value, theirs[name][0]) for name, (value, unit) in ours.items() if name in theirs]
    return Comparison(rows, _differences(a, b))


def _drafted(which: str, state: State) -> Draft:
    try:
        found = draft(state)
        _ = found.asked
    except Refused as refused:
        raise Refused([Problem(f"{which}: {p.key}", p.value, p.reason, p.legal) for p in refused.problems]) from None
    return found


def _pair(name: str, unit: str, a: float, b: float) -> Pair:
    same = abs(a - b) <= ALIKE * max(abs(a), abs(b)) or name in NEITHER
    better: Literal["a", "b"] | None = None if same else "b" if (b > a) == (name in MORE_IS_BETTER) else "a"
    return Pair(name, label(name), unit, a, b, b / a - 1 if a else None, better)


def _differences(a: Draft, b: Draft) -> list[Difference]:
    labels = {dial.key: dial.label for dial in DIALS}
    ours, theirs = _said(a), _said(b)
    return [
        Difference(key, labels.get(key, key), written(ours.get(key)), written(theirs.get(key)))
        for key in dict.fromkeys((*ours, *theirs))
        if ours.get(key) != theirs.get(key)
    ]


def _said(drafted: Draft) -> dict[str, Any]:
    state = drafted.state
    own = {"gpus": drafted.gpus, "software": state.software, "policy": drafted.software.policy.name}
    own |= {"expandable_segments": state.expandable_segments, "tokens": scaled(drafted.tokens)}
    return {**own, **dict(_keys(drafted.job))}


def _keys(table: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a job, or of a table in it, and their values."""
    for field in fields(table):
        value = getattr(table, field.name)
        if is_dataclass(value):
            yield from _keys(value, f"{before}{field.name}.")
        else:
            yield f"{before}{field.name}", value


@dataclass(frozen=True, kw_only=True)
class MeasuredInput:
    """A measurement of what a state plans."""

    state: State
    """The page's state."""
    figure: str
    """Which figure was measured, as in the figures of `plan`."""
    value: float
    """What was measured, in the figure's unit."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan beside a measurement."""

    figure: str
    """Its name."""
    label: str
    """Its name for people."""
    unit: str
    """Of the numbers."""
    planned: float
    """By the plan."""
    measured: float
    """As given."""
    residual: float
    """Measured − planned."""
    error: float | None
    """Planned ÷ measured − 1, as `trigrid validate` tells errors; null where nothing was measured."""
    margin: float | None
    """The error that nine measured runs of ten stay below; null where none is known for this figure."""
    within_margin: bool | None
    """Whether this one does."""
    words: str
    """The same in a sentence."""


def measured(asked: MeasuredInput) -> Measured:
    """How far a plan is from a measurement. Raises Refused for a figure that is none."""
    drafted = draft(asked.state)
    plan = drafted.plan
    known = figures(plan, drafted.tokens)
    if asked.figure not in known:
        closest = tuple(get_close_matches(asked.figure, known)) or tuple(known)
        raise Refused([Problem("figure", asked.figure, "no figure of a plan has this name", closest)])
    if asked.value < 0:
        raise Refused([Problem("value", asked.value, "must not be negative", (0,))])
    planned, unit = known[asked.figure]
    ratio = planned / asked.value if asked.value else inf
    error = ratio - 1 if isfinite(ratio) else None
    kind, margin = asked.figure.partition(".")[0], None
    if kind == "memory":
        margin = plan.machine.values["interval.memory"]
    elif kind in ("step_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu_full_attention", "mfu_causal"):
        margin = plan.machine.values["interval.time"]
    within = abs(error) <= margin if error is not None and margin is not None else None
    residual = asked.value - planned
    words = f"{label(asked.figure)}: planned {_shown(planned, unit)}, measured {_shown(asked.value, unit)}"
    if error is not None:
        words += f"; the plan is {abs(error):.1%} {'above' if error > 0 else 'below'} the measurement"
    if margin is not None and within is not None:
        words += f", {'within' if within else 'beyond'} its margin of {margin:.1%}"
    found = (planned, asked.value, residual, error, margin, within, words)
    return Measured(asked.figure, label(asked.figure), unit, *found)


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{gib(value)} GiB"
    return seconds(value) if unit == "s" else f"{digits(value)} {unit}"
