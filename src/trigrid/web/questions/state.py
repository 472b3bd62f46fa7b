"""The state of the page: the same for its URL, for every question and for the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from trigrid.errors import Problem, Refused
from trigrid.job.keys import Table
from trigrid.job.writing import plain
from trigrid.plan.shape import read_size, shape_of_size
from trigrid.spec.batch import NOT_GIVEN
from trigrid.spec.huggingface import model_of_config
from trigrid.spec.job import Batch, Job, Run
from trigrid.spec.model import ModelSpec
from trigrid.spec.models import load_model
from trigrid.spec.rules import check_singly

LONGEST_CONFIG = 16_384
"""Characters of a config.json, as compact JSON."""
CONFIG_NAME = "config.json"


Value = str | int | float | bool | list[str | int | float | bool]


@dataclass(frozen=True, kw_only=True)
class State:
    """What is planned: a model with GPUs, and values of the keys of a job file.

    The model is exactly one of `model`, `params` and `config`.
    """

    model: str | None = None
    """A name of the catalogue."""
    params: str | None = None
    """A size alone, such as "300B"."""
    config: dict[str, object] | None = None
    """The contents of a Hugging Face config.json."""
    gpus: int | None = None
    """GPUs to use at most; left out: as many as the degrees give."""
    software: str = "trigrid"
    """Who trains."""
    policy: str | None = None
    """Bytes of state per parameter, by name; left out: the software's own."""
    expandable_segments: bool = False
    """The allocator's segments grow (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."""
    tokens: str = "1T"
    """Tokens to train on, such as "15T"."""
    values: dict[str, Value] = field(default_factory=dict)
    """Values of job keys by their dotted names, such as "parallel.tp": 8."""
    locked: tuple[str, ...] = ()
    """Keys of knobs that a search must keep."""


def model_of(state: State) -> tuple[ModelSpec, Table]:
    """The shape of the state's model, and the same as a table, which is the caller's to change. Raises Refused."""
    given = {name: value for name in ("model", "params", "config") if (value := getattr(state, name)) is not None}
    if len(given) != 1:
        reason = "exactly one of model, params and config is needed"
        raise Refused([Problem("model", ", ".join(given) or NOT_GIVEN, reason)])
    if state.config is not None:
        spec, table = _of_config(json.dumps(state.config, separators=(",", ":")))
    else:
        spec, table = _of_name(state.model, state.params)
    return spec, {name: dict(value) if isinstance(value, dict) else value for name, value in table.items()}


@lru_cache(maxsize=128)
def _of_name(model: str | None, params: str | None) -> tuple[ModelSpec, Mapping[str, object]]:
    spec = load_model(model) if model is not None else shape_of_size(read_size(params or "", "params"))
    return spec, plain(spec)


@lru_cache(maxsize=32)
def _of_config(text: str) -> tuple[ModelSpec, Mapping[str, object]]:
    if len(text) > LONGEST_CONFIG:
        reason = f"is {len(text):,} characters long, more than {LONGEST_CONFIG:,}"
        raise Refused([Problem("config", CONFIG_NAME, reason)])
    spec = model_of_config(json.loads(text), CONFIG_NAME)
    if problems := check_singly(Job(model=spec, batch=Batch(global_batch=1, sequence=1), run=Run(steps=1))):
        raise Refused(problems)
    return spec, plain(spec)
