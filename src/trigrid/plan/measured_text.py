"""The text of a calibration's file, as `measured_file` reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields

from trigrid.plan.measured import Measured, Points
from trigrid.plan.measured_file import FORMAT


def measured_text(measured: Measured) -> str:
    """`measured` as TOML, raw points included."""
    return "\n".join(_blocks(measured)) + "\n"


def _blocks(measured: Measured) -> Iterator[str]:
    yield "# What `trigrid calibrate` measured or read; `trigrid plan JOB --cluster THIS_FILE` plans with it."
    yield f"format = {_value(FORMAT)}"
    yield _table("provenance", measured.about)
    if measured.gpus_per_node:
        yield _table("cluster", {"gpus_per_node": measured.gpus_per_node})
    if gpu := measured.accelerator:
        single = {f.name: getattr(gpu, f.name) for f in fields(gpu) if f.name != "aliases"}
        yield _table("accelerator", {**single, "presumed": list(measured.presumed)})
    for name, products in measured.products.items():
        yield _table(f"products.{name}", vars(products))
    for name, attention in measured.attention.items():
        yield _table(f"attention.{name}", vars(attention))
    if measured.passes:
        yield _table("passes", vars(measured.passes))
    for number_format, operations in measured.operations.items():
        for name, operation in operations.items():
            yield _table(f"operations.{number_format}.{name}", vars(operation))
    if measured.launch:
        yield _table("launch", vars(measured.launch))
    for wire in measured.wires:
        yield _table("wires", {**vars(wire), "tier": wire.tier.name.lower()}, "[[", "]]")
    if measured.values:
        yield _table("values", measured.values)


def _table(name: str, values: Mapping[str, object], begins: str = "[", ends: str = "]") -> str:
    lines = [f"\n{begins}{name}{ends}"]
    for key, value in values.items():
        shown = _points(value) if isinstance(value, tuple) else _value(value)
        lines.append(f"{_key(key)} = {shown}")
    return "\n".join(lines)


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() else _value(key)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(k))} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, float):
        # TOML wants digits on both sides of a point, if there is one.
        text = f"{value:.6g}"
        return f"{int(value)}.0" if text.isdigit() else text
    # Strings of JSON are strings of TOML.
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and value < 1e15 else f"{value:.6g}"


def _points(points: Points) -> str:
    """A point on each line."""
    if not points:
        return "[]"
    rows = ("  [" + ", ".join(map(_number, point)) + "]," for point in points)
    return "\n".join(["[", *rows, "]"])
