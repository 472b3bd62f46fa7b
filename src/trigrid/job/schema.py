"""JSON Schema of the job file, for editors that complete and check TOML."""

from __future__ import annotations

from math import isinf
from typing import get_args

from trigrid.job.keys import INPUT_ONLY, JobKey, Key, Table, job_keys, table_of
from trigrid.spec.job import Batch, Job
from trigrid.spec.model import ModelSpec
from trigrid.spec.models import catalogue
from trigrid.spec.rules import RANGES, whole_range


def job_schema() -> Table:
    """The job file as a user writes it, in draft 2020-12: types, choices, ranges, defaults, and what every key means.

    Rules that join several keys are not in it: `trigrid train JOB.toml --dry-run` tells those.
    """
    from pydantic import TypeAdapter

    schema = TypeAdapter(Job).json_schema()
    definitions = schema["$defs"]
    for owner, given in INPUT_ONLY.items():
        for name, (hint, _) in given.items():
            definitions[owner.__name__]["properties"][name] = TypeAdapter(hint).json_schema()
    tables: dict[Key, Table] = {(): schema}
    for key in job_keys():
        properties = tables[key.key[:-1]]["properties"]
        properties[key.key[-1]] = _property(key, properties[key.key[-1]])
        if inner := table_of(key.type):
            tables[key.key] = definitions[inner.__name__]
    for table in tables.values():
        table["additionalProperties"] = False
        table.pop("title", None)
        table.pop("description", None)
    _alternatives(definitions[ModelSpec.__name__], definitions[Batch.__name__])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "trigrid job", **schema}


def _property(key: JobKey, bare: Table) -> Table:
    """pydantic's schema of a field, with its meaning and its range; null, which TOML lacks, is taken out."""
    bare = next((choice for choice in bare.get("anyOf", ()) if "$ref" in choice), bare)
    kept = {name: value for name, value in bare.items() if name != "title"}
    kept.get("items", kept).update(_range(key))
    return {**kept, "description": key.meaning}


def _range(key: JobKey) -> Table:
    single = next(iter(get_args(key.type)), key.type)
    if single is int:
        low, high = whole_range(key.dotted)
        return {"minimum": low, "maximum": high}
    if single is not float:
        return {}
    legal = RANGES[key.dotted]
    bounds = {("minimum" if legal.ends[0] == "[" else "exclusiveMinimum"): legal.low}
    if not isinf(legal.high):
        bounds["maximum" if legal.ends[1] == "]" else "exclusiveMaximum"] = legal.high
    return bounds


def _alternatives(model: Table, batch: Table) -> None:
    """A model by name, by configuration or by its whole shape; the size of a batch by either of two keys."""
    names = sorted({name for key, entry in catalogue().items() for name in (key, *entry.aliases)})
    shape = model.pop("required")
    model["anyOf"] = [
        {"required": ["name"], "properties": {"name": {"enum": names}}},
        {"required": ["config"]},
        {"required": shape},
    ]
    batch["required"] = ["sequence"]
    batch["anyOf"] = [{"required": [name]} for name in ("global_batch", "accumulation")]
