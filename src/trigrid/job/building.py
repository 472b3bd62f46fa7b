"""The job's dataclasses from tables of plain values, with every missing key and every value of the wrong type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trigrid.job.keys import Key, Table, table_of

NEEDED: Mapping[object, str] = {
    MISSING: "needed",
    int: "a whole number is needed",
    float: "a number is needed",
    bool: "true or false is needed",
    str: "a string is needed",
    tuple: "an array is needed",
    dict: "a table is needed",
}
Report = Callable[[Key, str], None]
"""Told the key of what is missing or of the wrong type, and what is needed."""

_hints = cache(get_type_hints)


def build(table: type, given: Table, report: Report, key: Key = ()) -> Any:
    """The dataclass `table` from `given`, whose keys are known to be its own; None where anything was reported.

    Types are strict, but for a whole number where a float is needed and an array where a tuple is.
    """
    values, sound = {}, True

    def fault(key: Key, reason: str) -> None:
        nonlocal sound
        sound = False
        report(key, reason)

    for field in fields(table):
        if field.name in given:
            values[field.name] = _value(_hints(table)[field.name], given[field.name], fault, (*key, field.name))
        elif field.default is MISSING and field.default_factory is MISSING:
            fault((*key, field.name), NEEDED[MISSING])
    return table(**values) if sound else None


def _value(hint: Any, given: Any, report: Report, key: Key) -> Any:
    inner = table_of(hint)
    if inner is not None:
        if given is None and NoneType in get_args(hint):
            return None
        if not isinstance(given, dict):
            return report(key, NEEDED[dict])
        return build(inner, given, report, key)
    if get_origin(hint) is Literal:
        same = [choice for choice in get_args(hint) if type(choice) is type(given) and choice == given]
        return given if same else report(key, f"one of {', '.join(map(str, get_args(hint)))} is needed")
    if get_origin(hint) is tuple:
        if not isinstance(given, list):
            return report(key, NEEDED[tuple])
        return tuple([_value(get_args(hint)[0], element, report, key) for element in given])
    if args := get_args(hint):
        # Either one value or an array of them.
        array = next(arg for arg in args if get_origin(arg) is tuple)
        single = next(arg for arg in args if arg is not array)
        return _value(array if isinstance(given, list) else single, given, report, key)
    if hint is float and type(given) is int:
        return float(given)
    return given if type(given) is hint else report(key, NEEDED[hint])
