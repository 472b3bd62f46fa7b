"""Answers as plain values, and what several of them share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Any

from trigrid.errors import Problem as Told

LONGEST_VALUE = 200
SINGLE = {str, int, float, bool, NoneType}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something is refused, as the command line says it."""

    key: str
    """Whose value: a job key, or a name of a state."""
    value: str
    """As it was given."""
    reason: str
    """In a sentence."""
    nearest: list[str | int | float | bool]
    """The nearest values that are legal."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a question has no answer."""

    problems: list[Problem]
    """All of them at once."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit."""

    value: float
    """The number."""
    unit: str
    """Of what."""


def problem(told: Told) -> Problem:
    """A problem as an answer has it."""
    nearest = [value if isinstance(value, str | int | float | bool) else str(value) for value in told.legal]
    return Problem(told.key, _short(str(told.value)), _short(told.reason), nearest)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def written(value: object) -> str:
    """The value of a key as people write it; empty for none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def plain(value: Any) -> Any:
    """Dataclasses as dictionaries, within lists and dictionaries too; everything else as it is."""
    kind: Any = type(value)
    if kind in SINGLE:
        return value
    if kind is list or kind is tuple:
        # Long columns of numbers are not looked through.
        return list(value) if value and type(value[0]) in SINGLE else [plain(inner) for inner in value]
    if kind is dict:
        return {name: plain(inner) for name, inner in value.items()}
    return {name: plain(getattr(value, name)) for name in _names(kind)}


@cache
def _names(table: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(table))
