"""The dials: what is offered as legal is legal, and what is not says why."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.page_states import STATES
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trigrid.spec.rules import check
from trigrid.web.questions import answer
from trigrid.web.questions.controls import MOST, controls
from trigrid.web.questions.dials import DIALS
from trigrid.web.questions.draft import draft
from trigrid.web.questions.moves import ALONE, Moves, put
from trigrid.web.questions.reading import read
from trigrid.web.questions.state import State

FOURTH = 4
SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def moved(state: dict[str, Any], key: str, choice: dict[str, Any]) -> dict[str, Any]:
    """`state` after a turn of the dial `key`, as a page makes it."""
    if "." not in key:
        return {**state, key: choice["value"]}
    return {**state, "values": {**state["values"], key: choice["value"], **choice["also"]}}


@SETTINGS
@given(STATES, st.integers(0, FOURTH - 1))
@example({"model": "llama3-8b", "gpus": 8, "values": {"run.precision": "fp64"}}, 3)
@example({"model": "llama3-8b", "gpus": 1, "values": {"parallel.virtual_stages": 2}}, 0)
def test_legal_is_what_can_be_planned(state: dict[str, Any], first: int) -> None:
    """Values of every dial, a fourth of them at a time, turned as a page turns it."""
    here = answer("plan", {"state": state})
    for control in here["controls"]:
        assert len(control["values"]) <= MOST
        assert control["label"]
        assert control["help"]
        for choice in control["values"][first::FOURTH]:
            there = draft(read(State, moved(here["state"], control["key"], choice)))
            assert choice["legal"] is not bool(there.problems), (control["key"], choice, there.problems)
            assert choice["legal"] is not bool(choice["reason"])


@SETTINGS
@given(STATES)
def test_no_rule_joins_what_is_told_alone(state: dict[str, Any]) -> None:
    """The short cut for such keys is right: with any of their values the whole job breaks the same rules."""
    drafted = draft(read(State, state))
    for dial in DIALS:
        if dial.key in ALONE:
            for value in [choice.value for one in controls(drafted) if one.key == dial.key for choice in one.values]:
                assert check(put(drafted.job, dial.key, value)) == check(drafted.job), (dial.key, value)


def test_a_draft_is_left_as_it_is() -> None:
    drafted = draft(State(model="llama3-8b", gpus=8))
    before = repr(drafted.job)
    Moves(drafted).choice("parallel.tp", 2)
    assert put(drafted.job, "parallel.tp", 2).parallel.tp == 2
    assert repr(drafted.job) == before


@pytest.mark.parametrize(
    ("values", "key", "value", "also"),
    [
        ({"parallel.pp": 4}, "parallel.schedule", "zbv", {"parallel.virtual_stages": 2}),
        ({"parallel.pp": 4}, "parallel.schedule", "interleaved", {"parallel.virtual_stages": 2}),
        ({"parallel.pp": 4}, "parallel.virtual_stages", 4, {"parallel.schedule": "interleaved"}),
        (
            {"parallel.pp": 4, "parallel.schedule": "zbv", "parallel.virtual_stages": 2},
            "parallel.virtual_stages",
            1,
            {"parallel.schedule": "1f1b"},
        ),
        (
            {"parallel.pp": 4, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2},
            "parallel.pp",
            1,
            {"parallel.virtual_stages": 1, "parallel.schedule": "1f1b"},
        ),
        ({"parallel.zero": 3, "parallel.gather": "per_use"}, "parallel.zero", 1, {"parallel.gather": "auto"}),
        ({}, "cluster.gpu", "gb200", {"cluster.gpus_per_node": 72}),
    ],
)
def test_what_goes_together_moves_together(
    values: dict[str, Any], key: str, value: object, also: dict[str, object]
) -> None:
    """So that every schedule is reached by single moves."""
    state = {"model": "llama3-8b", "gpus": 64, "values": {"batch.global_batch": 64, **values}}
    control = next(one for one in answer("plan", {"state": state})["controls"] if one["key"] == key)
    choice = next(one for one in control["values"] if one["value"] == value)
    assert choice["legal"], choice
    assert choice["also"] == also


def test_dials_are_those_of_the_planner() -> None:
    keys = [dial.key for dial in DIALS]
    assert len(set(keys)) == len(keys)
    assert {control["key"] for control in answer("plan", {"state": {"model": "llama3-8b", "gpus": 8}})["controls"]} == {
        key for key in keys if key != "parallel.ep"
    }
    experts = answer("plan", {"state": {"model": "mixtral-8x7b", "gpus": 8}})["controls"]
    assert "parallel.ep" in [control["key"] for control in experts]
