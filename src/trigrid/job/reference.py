"""Every key of the job file as Markdown tables: what `docs/job.md` ends with."""

from __future__ import annotations

from dataclasses import MISSING
from math import isinf
from typing import get_args, get_origin

from trigrid.job.keys import JobKey, choices, job_keys, takes_array
from trigrid.job.writing import one_line
from trigrid.spec.rules import LARGEST_COUNT, RANGES, whole_range

TITLE = "## Every key"


def reference() -> str:
    """A heading, then for each section a table of keys, legal values, defaults and meanings."""
    lines = [TITLE]
    for key in job_keys():
        if len(key.key) == 1:
            lines += ["", f"### [{key.dotted}]", "", key.meaning, ""]
            lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
        else:
            default = "" if key.default is MISSING else "none" if key.default is None else f"`{one_line(key.default)}`"
            lines.append(f"| `{'.'.join(key.key[1:])}` | {_values(key)} | {default} | {key.meaning} |")
    return "\n".join(lines)


def _values(key: JobKey) -> str:
    """The legal values of `key` in words."""
    several = get_origin(key.type) is tuple
    single = get_args(key.type)[0] if several else key.type
    if legal := choices(single):
        either = " or an array of them" if takes_array(key.type) and not several else ""
        return ("array of " if several else "") + ", ".join(f"`{one_line(choice)}`" for choice in legal) + either
    kinds = {bool: "`true`, `false`", str: "string", int: "whole number", float: "number"}
    kind = kinds.get(single, "table")
    return (f"array of {kind}s" if several else kind) + _range(key, single)


def _range(key: JobKey, single: object) -> str:
    if single is int:
        low, high = whole_range(key.dotted)
        return f" from {low}" + (f" to {high}" if high < LARGEST_COUNT else "")
    if single is not float:
        return ""
    legal = RANGES[key.dotted]
    below = f" to {legal.high:g}" if legal.ends[1] == "]" else f", below {legal.high:g}"
    return f" {'from' if legal.ends[0] == '[' else 'above'} {legal.low:g}" + ("" if isinf(legal.high) else below)
