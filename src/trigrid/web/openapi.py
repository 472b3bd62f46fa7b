"""The questions as OpenAPI, from the dataclasses that they take and give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_type_hints

from pydantic import TypeAdapter

from trigrid.job.keys import field_docs
from trigrid.web.questions import QUESTIONS, Question
from trigrid.web.questions.answers import Refusal
from trigrid.web.questions.state import State

REF = "#/components/schemas/{model}"
STATE = {
    "model": "llama3-8b",
    "gpus": 64,
    "values": {"parallel.tp": 8, "parallel.pp": 4, "batch.global_batch": 70, "batch.sequence": 4096},
}
EXAMPLES: dict[str, object] = {
    **{name: {"state": STATE} for name in QUESTIONS},
    "explain": {"state": STATE, "figure": "memory.activations", "stage": 0},
    "measured": {"state": STATE, "figure": "step_s", "value": 0.5},
    "compare": {"a": STATE, "b": {**STATE, "gpus": 32}},
    "export": {"state": STATE, "target": "megatron"},
    "smaller": {"state": STATE, "than_bytes": 70_000_000_000, "best_s": 0.65},
    "link": {"query": "model=llama3-8b&gpus=64&tp=8&pp=4&global-batch=70&seq=4096"},
    "catalogue": {},
    "presets": {},
}
SAID = {
    400: "The request is no HTTP as it should be.",
    403: "A page of another site asks.",
    409: "A newer question of the same page came.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    421: "The Host is no name of this server.",
    422: "What is asked is refused.",
    429: "So many requests a second are too many.",
    503: "So many questions wait that this one does not.",
}


def operation(question: Question) -> dict[str, Any]:
    """Body and responses of a question's endpoint, for FastAPI's `openapi_extra`."""
    codes = [code for code in SAID if question.slow or code != 409]
    return {
        "requestBody": {"required": True, "content": _json(question.input, EXAMPLES.get(question.name))},
        "responses": {
            "200": {"description": "The answer.", "content": _json(question.output)},
            **{str(code): {"description": SAID[code], "content": _json(Refusal)} for code in codes},
        },
    }


def schemas(questions: Iterable[Question]) -> dict[str, Any]:
    """The schemas of every type that a question takes or gives, by name, with the meaning of every field."""
    own = (Refusal, *(table for question in questions for table in (question.input, question.output)))
    found: dict[str, Any] = {}
    for table in dict.fromkeys(inner for outer in own for inner in _tables(outer)):
        schema = TypeAdapter(table).json_schema(ref_template=REF, mode=_mode(table))
        schema.pop("$defs", None)
        meanings = field_docs(table)
        for name, field in schema.get("properties", {}).items():
            field["description"] = meanings[name]
            field.pop("title", None)
        schema["additionalProperties"] = False
        found[table.__name__] = schema
    return found


def _mode(table: type) -> Literal["validation", "serialization"]:
    """What is taken may leave out what has a default."""
    return "validation" if table is State or table.__name__.endswith("Input") else "serialization"


def _tables(table: Any) -> Iterator[type]:
    """`table` and the dataclasses within it."""
    yield table
    for hint in get_type_hints(table).values():
        yield from (inner for one in _within(hint) for inner in _tables(one))


def _within(hint: Any) -> Iterator[Any]:
    if is_dataclass(hint):
        yield hint
    for arg in get_args(hint):
        yield from _within(arg)


def _json(table: type, example: object = None) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": {"$ref": REF.format(model=table.__name__)}}
    return {"application/json": media if example is None else {**media, "example": example}}
