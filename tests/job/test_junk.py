"""Whatever a file, a variable or a flag holds: a job that keeps the rules or a refusal in words, never a traceback."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import tomli_w
from helpers.job_files import JOB, write
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.errors import Refused
from trigrid.job import dump_job, job_from_text, load_job
from trigrid.job.starter import starter
from trigrid.spec.job import Job
from trigrid.spec.layout import AXES
from trigrid.spec.rules import check

KEYS = [
    *AXES,
    "model",
    "name",
    "config",
    "hidden",
    "rope_scaling",
    "factor",
    "parallel",
    "zero",
    "order",
    "run",
    "steps",
    "batch",
    "global_batch",
    "micro_batch",
    "accumulation",
    "training",
]
scalars: st.SearchStrategy[Any] = st.one_of(
    st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec="utf-8"), max_size=6), st.datetimes()
)
names = st.sampled_from(KEYS) | st.text(st.characters(codec="utf-8"), max_size=4)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


def attempt(path: str, arguments: list[str], env: dict[str, str], world: int | None = None) -> None:
    """A job that keeps the rules, or a refusal that can be printed; anything else fails the test."""
    outcome: Job | str
    try:
        outcome = load_job(path, arguments, world, env)
    except Refused as refused:
        outcome = str(refused)
    assert check(outcome) == [] if isinstance(outcome, Job) else outcome


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else (prefix + name,)


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(codec="utf-8")) | st.text("[]{}=.,'\"\n#abt123", max_size=40))
def test_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    attempt(write(tmp_path_factory.getbasetemp(), text), [], {})


@settings(max_examples=80, deadline=None)
@given(table=st.dictionaries(names, junk, min_size=1, max_size=5), world=st.none() | st.integers(-2, 99))
def test_any_table(tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any], world: int | None) -> None:
    attempt(write(tmp_path_factory.getbasetemp(), tomli_w.dumps(table)), [], {}, world)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_sound_job_with_one_value_of_junk(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write(tmp_path_factory.getbasetemp(), JOB)
    every = [*leaves(tomllib.loads(dump_job(load_job(path, env={})))), "batch.accumulation", "model.config"]
    key, value = data.draw(st.sampled_from(every)), data.draw(junk)
    text = tomli_w.dumps({"v": value}).strip().removeprefix("v = ")
    attempt(path, [f"--{key}={text}"], {})
    attempt(path, [], {"TRIGRID_" + key.replace(".", "__").upper(): text})


@settings(max_examples=80, deadline=None)
@given(
    arguments=st.lists(
        st.text(max_size=9) | st.sampled_from(["--tp", "--model.config", "--accumulation", "2"]), max_size=4
    ),
    env=st.dictionaries(st.text(max_size=5).map("TRIGRID_".__add__), st.text(max_size=9), max_size=2),
)
def test_any_arguments(tmp_path_factory: pytest.TempPathFactory, arguments: list[str], env: dict[str, str]) -> None:
    attempt(write(tmp_path_factory.getbasetemp(), JOB), arguments, env)
    with suppress(Refused):
        job_from_text(starter(arguments, env))


numbers = st.none() | st.integers(-1, 12)


@settings(max_examples=150, deadline=None)
@given(four=st.tuples(numbers, numbers, numbers, numbers), world=st.none() | st.integers(-1, 24))
def test_any_batch(tmp_path_factory: pytest.TempPathFactory, four: tuple[int | None, ...], world: int | None) -> None:
    text = JOB.replace("global_batch = 48\n", "").replace("micro_batch = 1\n", "")
    flags = ("--global-batch", "--micro-batch", "--accumulation", "--dp")
    given_ = [f"{flag}={number}" for flag, number in zip(flags, four, strict=True) if number is not None]
    attempt(write(tmp_path_factory.getbasetemp(), text), given_, {}, world)
