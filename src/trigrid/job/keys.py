"""The keys of a job file: the fields of the job's dataclasses, and what only a file may say."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trigrid.spec.job import Batch, Job
from trigrid.spec.model import ModelSpec

Key = tuple[str, ...]
Table = dict[str, Any]

# What a file may give instead of the fields that it decides: type and meaning.
INPUT_ONLY: dict[type, dict[str, tuple[Any, str]]] = {
    ModelSpec: {"config": (str, "A Hugging Face config.json that fills in the whole shape, from the job's folder.")},
    Batch: {"accumulation": (int, "Microbatches of a rank in a step, in place of global_batch, micro_batch or dp.")},
}


@dataclass(frozen=True, kw_only=True)
class JobKey:
    """A key and what it means; `default` is dataclasses.MISSING where it has none."""

    key: Key
    type: Any
    meaning: str
    default: Any

    @property
    def dotted(self) -> str:
        return ".".join(self.key)


@cache
def key_types(table: type = Job) -> Table:
    """Names of `table`'s keys with their types, or with such a table of their own where they are tables."""
    types: Table = {name: hint for name, (hint, _) in INPUT_ONLY.get(table, {}).items()}
    for name, hint in get_type_hints(table).items():
        inner = table_of(hint)
        types[name] = key_types(inner) if inner else hint
    return types


def type_of(key: Key) -> Any:
    """The type of `key`, a dictionary of types where it is a table, None where there is no such key."""
    found: Any = key_types()
    for name in key:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def table_of(hint: Any) -> type | None:
    """The dataclass that the type `hint` is or may be."""
    return next((t for t in (hint, *get_args(hint)) if isinstance(t, type) and is_dataclass(t)), None)


def choices(hint: Any) -> tuple[Any, ...]:
    """The values that a Literal, or each element of a tuple of Literals, may have, or of either; else empty."""
    literal = next((t for t in (hint, *get_args(hint)) if get_origin(t) is Literal), None)
    return get_args(literal)


def takes_array(hint: Any) -> bool:
    """Whether an array may stand for a value of the type `hint`."""
    return any(get_origin(t) is tuple for t in (hint, *get_args(hint)))


def key_names(types: Table, prefix: str = "") -> Iterator[str]:
    """The dotted names of all keys and tables below `types`."""
    for name, inner in types.items():
        yield prefix + name
        if isinstance(inner, dict):
            yield from key_names(inner, f"{prefix}{name}.")


def job_keys(table: type = Job, prefix: Key = ()) -> Iterator[JobKey]:
    """Every key below `table`, a table before its keys; what only a file may say comes last."""
    meanings, hints = field_docs(table), get_type_hints(table)
    for field in fields(table):
        default = MISSING if field.default_factory is not MISSING else field.default
        key = (*prefix, field.name)
        yield JobKey(key=key, type=hints[field.name], meaning=meanings[field.name], default=default)
        if inner := table_of(hints[field.name]):
            yield from job_keys(inner, key)
    for name, (hint, meaning) in INPUT_ONLY.get(table, {}).items():
        yield JobKey(key=(*prefix, name), type=hint, meaning=meaning, default=MISSING)


def field_docs(table: type) -> dict[str, str]:
    """The docstring under each field of the dataclass `table`, on one line. It is read from the source."""
    (definition,) = ast.parse(inspect.getsource(table)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, below in pairwise(definition.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs
