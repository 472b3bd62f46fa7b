"""The dials: what each is set to, and the values that it offers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, cast

from trigrid.job.keys import JobKey, choices, field_docs, job_keys
from trigrid.web.questions.dials import DIALS, Dial, Group, Kind
from trigrid.web.questions.draft import Draft
from trigrid.web.questions.moves import Choice, Moves, get
from trigrid.web.questions.state import State

MOST = 24
"""Values of a slider."""


@dataclass(frozen=True, slots=True)
class Control:
    """A dial."""

    key: str
    """A job key, or a name of the state."""
    label: str
    """Its name for people."""
    help: str
    """What it means."""
    unit: str
    """Of the value."""
    kind: Kind
    """What is entered."""
    value: str | int | float | bool | list[str | int | float | bool] | None
    """As it is."""
    default: str | int | float | bool | None
    """Where nothing is given."""
    values: list[Choice]
    """Values to offer; none where any number will do."""
    advanced: bool
    """Whether it is folded away."""
    group: Group
    """Where it stands."""
    knob: bool
    """Whether a search may turn it, and it may be locked."""


def controls(draft: Draft) -> list[Control]:
    """Every dial of `draft`."""
    moves = Moves(draft)
    shown = (dial for dial in DIALS if dial.key != "parallel.ep" or draft.job.model.experts)
    return [_keyed(draft, dial, moves) if "." in dial.key else _own(draft, dial, moves) for dial in shown]


def _keyed(draft: Draft, dial: Dial, moves: Moves) -> Control:
    """The dial of a job key."""
    key, value = _keys()[dial.key], get(draft.job, dial.key)
    legal = choices(key.type)
    offered = [*dial.offer(draft), *([] if isinstance(value, tuple) else [value])] if dial.offer else [*legal]
    kind: Kind = "whole" if key.type is int else "number" if key.type is float else "choice"
    return Control(
        key=dial.key,
        label=dial.label,
        help=key.meaning,
        unit=dial.unit,
        kind=kind,
        value=cast(Any, list(value) if isinstance(value, tuple) else value),
        default=None if key.default is MISSING else cast(Any, key.default),
        values=[moves.choice(dial.key, one) for one in _spread(offered)],
        advanced=dial.advanced,
        group=dial.group,
        knob=dial.knob,
    )


def _own(draft: Draft, dial: Dial, moves: Moves) -> Control:
    """The dial of a name of the state."""
    value = getattr(draft.state, dial.key)
    shown: Any = {"gpus": draft.gpus, "policy": draft.software.policy.name}.get(dial.key, value)
    offered = _spread([*dial.offer(draft), shown]) if dial.offer else []
    return Control(
        key=dial.key,
        label=dial.label,
        help=_meanings()[dial.key],
        unit=dial.unit,
        kind="whole" if dial.key == "gpus" else "choice" if dial.offer else "text",
        value=shown,
        default=getattr(State(), dial.key),
        values=[moves.gpus(one) if dial.key == "gpus" else moves.alone(one) for one in offered],
        advanced=dial.advanced,
        group=dial.group,
        knob=False,
    )


def _spread(values: Iterable[Any]) -> list[Any]:
    """At most MOST of `values`, numbers in order."""
    once = list(dict.fromkeys(values))
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in once):
        return once
    once.sort()
    if len(once) <= MOST:
        return once
    step = (len(once) - 1) / (MOST - 1)
    return [once[round(place * step)] for place in range(MOST)]


@cache
def _keys() -> dict[str, JobKey]:
    return {key.dotted: key for key in job_keys()}


@cache
def _meanings() -> dict[str, str]:
    return field_docs(State)
