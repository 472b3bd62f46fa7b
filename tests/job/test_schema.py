"""The JSON Schema of the job file, held against jobs by the small part of the standard that it uses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.job_files import JOB

from trigrid.job.keys import Table
from trigrid.job.schema import job_schema
from trigrid.job.starter import starter

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
SCHEMA = job_schema()
KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
LIMITS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
}
KNOWN = {*LIMITS, "type", "enum", "items", "properties", "additionalProperties", "required", "anyOf", "$ref"}
SILENT = {"description", "default", "$schema", "$defs", "title"}


def faults(schema: Table, value: Any, key: str = "job") -> Iterator[str]:
    """Where `value` breaks `schema`; a keyword that this does not understand fails the test."""
    assert schema.keys() <= KNOWN | SILENT, schema.keys()
    if "$ref" in schema:
        yield from faults(SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, key)
    if "type" in schema and (
        not isinstance(value, KINDS[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean")
    ):
        yield f"{key}: {schema['type']}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{key}: enum"
    yield from (f"{key}: {word}" for word, keeps in LIMITS.items() if word in schema and not keeps(value, schema[word]))
    if isinstance(value, list):
        for item in value:
            yield from faults(schema.get("items", {}), item, key)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name, inner in value.items():
            if name in properties:
                yield from faults(properties[name], inner, f"{key}.{name}")
            elif schema.get("additionalProperties") is False:
                yield f"{key}.{name}: unknown"
        yield from (f"{key}.{name}: required" for name in schema.get("required", ()) if name not in value)
    if "anyOf" in schema and all(any(faults(choice, value)) for choice in schema["anyOf"]):
        yield f"{key}: anyOf"


def told(text: str) -> list[str]:
    return list(faults(SCHEMA, tomllib.loads(text)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_keep_it(path: Path) -> None:
    assert told(path.read_text(encoding="utf-8")) == []


def test_what_init_writes_keeps_it() -> None:
    for arguments in ([], ["--model.name", "llama3-8b", "--tp", "8"], ["--model.rope_scaling.factor", "8"]):
        assert told(starter(arguments, {})) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("zero = 2", "zeroo = 2", "job.parallel.zeroo: unknown"),
        ("[run]", "[runn]\n[run]", "job.runn: unknown"),
        ("zero = 2", "zero = 4", "job.parallel.zero: enum"),
        ("tp = 2", "tp = 0", "job.parallel.tp: minimum"),
        ("tp = 2", "tp = '2'", "job.parallel.tp: integer"),
        ("tp = 2", "stage_layers = [-1]", "job.parallel.stage_layers: minimum"),
        ("steps = 10", "", "job.run.steps: required"),
        ("steps = 10", "steps = 10\nprometheus_port = 65536", "job.run.prometheus_port: maximum"),
        ("steps = 10", "steps = 10\ntrackers = ['comet']", "job.run.trackers: enum"),
        ("steps = 10", "steps = 10\n[optimizer]\nbeta1 = 1.0", "job.optimizer.beta1: exclusiveMaximum"),
        ("steps = 10", "steps = 10\n[data]\nweights = [0]", "job.data.weights: exclusiveMinimum"),
        ("sequence = 32", "", "job.batch.sequence: required"),
        ("global_batch = 48", "", "job.batch: anyOf"),
        ("hidden = 64", "", "job.model: anyOf"),
        ('name = "own"', "", "job.model: anyOf"),
        ("context = 64", "context = 64\nrope_scaling.low_freq_factor = 1", "job.model.rope_scaling.factor: required"),
    ],
)
def test_mistakes_break_it(old: str, new: str, fault: str) -> None:
    assert told(JOB) == []
    assert told(JOB.replace(old, new)) == [fault]


def test_what_only_a_file_says_is_in_it() -> None:
    assert told(JOB.replace("global_batch = 48", "accumulation = 2")) == []
    shape, rest = JOB.index("name ="), JOB.index("[batch]")
    assert told(JOB[:shape] + "config = 'config.json'\n" + JOB[rest:]) == []
    assert told(JOB[:shape] + "name = 'llama3-8b'\n" + JOB[rest:]) == []
    assert told(JOB[:shape] + "name = 'llama3-8bb'\n" + JOB[rest:]) == ["job.model: anyOf"]


def test_it_is_json_of_the_draft_that_it_names() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA
    assert "null" not in json.dumps(SCHEMA)
    assert SCHEMA["required"] == ["model", "batch", "run"]
