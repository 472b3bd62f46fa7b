"""A state as a link and as a command line."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from helpers.page_states import STATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trigrid.errors import Refused
from trigrid.web.questions import answer
from trigrid.web.questions.link import command_of, query_of, state_of
from trigrid.web.questions.reading import read
from trigrid.web.questions.state import State

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
WORDS = st.text(min_size=1, max_size=12).filter(lambda text: not any("\ud800" <= letter <= "\udfff" for letter in text))


@SETTINGS
@given(
    STATES, WORDS, st.sampled_from(["model", "params"]), st.lists(st.sampled_from(["parallel.tp", "batch.micro_batch"]))
)
def test_a_link_gives_the_state_back(state: dict[str, Any], word: str, name: str, locked: list[str]) -> None:
    """Whatever stands in it; so does the question."""
    given_ = read(State, {**state, "model": None, "params": None, name: word, "policy": word, "locked": locked})
    assert state_of(query_of(given_)) == given_
    assert answer("link", {"query": "#" + query_of(given_)})["query"] == query_of(given_)


@SETTINGS
@given(WORDS)
def test_strings_keep_their_kind(word: str) -> None:
    """A string that spells a number is no number in a link."""
    state = State(
        model="x", values={"cluster.gpu": word, "run.out": word, "parallel.schedule": word, "parallel.tp": word}
    )
    assert state_of(query_of(state)) == state


def test_a_config_travels_in_a_link() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "text": "ü=&#?"}
    state = State(config=config, gpus=8)
    assert state_of(query_of(state)) == state
    assert command_of(state) == "trigrid plan config.json --gpus 8"


def test_spellings_are_those_of_the_command_line() -> None:
    state = state_of(
        "model=llama3-8b&gpus=64&tp=8&global-batch=70&seq=4096&expandable-segments=true&locked=tp,micro-batch"
    )
    assert state.values == {"parallel.tp": 8, "batch.global_batch": 70, "batch.sequence": 4096}
    assert state.locked == ("parallel.tp", "batch.micro_batch")
    words = shlex.split(command_of(state))
    assert words[:3] == ["trigrid", "plan", "llama3-8b"]
    assert words[3:6] == ["--gpus", "64", "--expandable-segments"]
    assert words[-2:] == ["--seq", "4096"]


@pytest.mark.parametrize(
    "query",
    [
        "model",
        "gpus=many",
        "gpus=" + "9" * 30,
        "expandable-segments=maybe",
        "config=%00",
        "config=e30x",
        "&".join(f"tp={n}" for n in range(300)),
        "model=" + "x" * 40_000,
    ],
)
def test_links_that_make_no_sense_are_refused(query: str) -> None:
    with pytest.raises(Refused):
        answer("link", {"query": query})


def test_one_of_query_and_state() -> None:
    for body in ({}, {"query": "", "state": {}}):
        with pytest.raises(Refused, match="exactly one"):
            answer("link", body)
    assert answer("link", {"query": ""})["state"]["model"] is None
