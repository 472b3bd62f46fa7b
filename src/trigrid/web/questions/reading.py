"""What comes as JSON, as the dataclass that a question takes: strict, and every mistake told at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trigrid.errors import Problem, Refused
from trigrid.job.sources import shown

T = TypeVar("T")
DEEP = "nested too deeply"
DEEPEST, MOST_INNER, LONGEST_NAME = 64, 4096, 256
"""Of a body: levels, elements of an array or an object, and characters of a key."""
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", dict: "an object"}
Report = Callable[[str, object, str, tuple[object, ...]], Any]
"""Told key, value, reason and legal values of a problem; gives None, in place of a value."""

_hints = cache(get_type_hints)


def parse(text: bytes | str) -> object:
    """The value that JSON `text` is. Raises Refused for what is none, as for numbers that JSON does not have and text
    that UTF-8 does not have, and for what is larger than a question ever is."""

    def finite(word: str) -> float:
        if not isfinite(value := float(word)):
            raise ValueError(f"{word} is no number of JSON")
        return value

    try:
        found: object = json.loads(text, parse_constant=finite, parse_float=finite)
        reason = _too_large(found)
    except (ValueError, RecursionError) as error:
        reason = DEEP if isinstance(error, RecursionError) else f"not JSON: {error}"
    if reason:
        raise Refused([Problem("body", "(the request)", reason)])
    return found


def _too_large(value: object, levels: int = DEEPEST) -> str:
    """Why `value` is larger than a question ever is; empty where it is not. Raises ValueError for a lone surrogate."""
    if isinstance(value, str):
        value.encode()
    if not isinstance(value, dict | list):
        return ""
    if not levels:
        return DEEP
    if len(value) > MOST_INNER:
        return f"holds an array or object of {len(value):,} elements, more than {MOST_INNER:,}"
    if isinstance(value, dict) and any(len(name) > LONGEST_NAME for name in value):
        return f"holds a key of more than {LONGEST_NAME} characters"
    inner = (*value, *value.values()) if isinstance(value, dict) else value
    return next(filter(None, (_too_large(one, levels - 1) for one in inner)), "")


def read(table: type[T], given: object, key: str = "body") -> T:
    """The dataclass `table` from `given`, plain values as of JSON. Raises Refused with every problem found."""
    problems: list[Problem] = []

    def report(key: str, value: object, reason: str, legal: tuple[object, ...] = ()) -> None:
        problems.append(Problem(key, shown(value), reason, legal))

    found: T = _table(table, given, key, report)
    if problems:
        raise Refused(problems)
    return found


def _table(table: Any, given: object, key: str, report: Report) -> Any:
    if not isinstance(given, dict):
        return report(key, given, f"{WORDS[dict]} is needed", ())
    hints, values = _hints(table), {}
    for name in given.keys() - hints.keys():
        closest = tuple(get_close_matches(str(name), hints)) or tuple(hints)
        report(_below(key, name), given[name], "there is no such key", closest)
    for field in fields(table):
        if field.name in given:
            values[field.name] = _value(hints[field.name], given[field.name], _below(key, field.name), report)
        elif field.default is MISSING and field.default_factory is MISSING:
            values[field.name] = report(_below(key, field.name), "(not given)", "needed", ())
    return table(**values)


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key != "body" else name


def _value(hint: Any, given: Any, key: str, report: Report) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if given is None and NoneType in args:
            return None
        kinds = [arg for arg in args if arg is not NoneType]
        return _value(kinds[0], given, key, report) if len(kinds) == 1 else _any(kinds, given, key, report)
    if is_dataclass(hint):
        return _table(hint, given, key, report)
    if origin is Literal:
        return given if isinstance(given, str) and given in args else report(key, given, "no such choice", args)
    if origin is tuple:
        if not isinstance(given, list):
            return report(key, given, "an array is needed", ())
        return tuple(_value(args[0], element, f"{key}[{place}]", report) for place, element in enumerate(given))
    if origin is dict:
        if not isinstance(given, dict):
            return report(key, given, f"{WORDS[dict]} is needed", ())
        return {name: _value(args[1], value, _below(key, name), report) for name, value in given.items()}
    if hint is object:
        return given
    if hint is float and type(given) is int and abs(given) < 2**63:
        return float(given)
    return given if type(given) is hint else report(key, given, f"{WORDS[hint]} is needed", ())


def _any(kinds: list[Any], given: Any, key: str, report: Report) -> Any:
    """`given` where it is of one of `kinds`, single types and arrays of such."""
    inner = next((get_args(kind) for kind in kinds if get_origin(kind) is list), ())
    singles = [kind for kind in kinds if isinstance(kind, type)]
    if type(given) in singles or (inner and isinstance(given, list) and all(type(v) in _singles(inner) for v in given)):
        return given
    return report(key, given, "a single value is needed, or an array of such", ())


def _singles(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    return get_args(kinds[0]) or kinds
