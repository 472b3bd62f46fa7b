"""A state as the part of a URL after "#", and as a command line: the same names and spellings in both."""

from __future__ import annotations

import json
import shlex
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from trigrid.errors import Problem, Refused
from trigrid.job.sources import SHORT_FLAGS, shown, value_of
from trigrid.job.writing import one_line
from trigrid.web.questions.reading import parse
from trigrid.web.questions.state import CONFIG_NAME, State, Value

LONGEST = 32_768
"""Characters of a query."""
MOST_PAIRS = 256
SHORT_NAMES = {".".join(key): name.replace("_", "-") for name, key in SHORT_FLAGS.items()}
OWN = ("model", "params", "config", "gpus", "software", "policy", "expandable-segments", "tokens", "locked")


@dataclass(frozen=True, kw_only=True)
class LinkInput:
    """A state, or what comes after "#"."""

    query: str | None = None
    """Parameters as in a URL, with names as the command line's flags."""
    state: State | None = None
    """The state to make them of."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Three spellings of one state."""

    state: State
    """The state."""
    query: str
    """Parameters as in a URL."""
    command: str
    """The command line that prints the same plan."""


def link(asked: LinkInput) -> Link:
    """The state of a query, or the query of a state. Raises Refused for names and values that are none."""
    if (asked.query is None) == (asked.state is None):
        raise Refused([Problem("query", shown(asked.query), "exactly one of query and state is needed")])
    state = asked.state or state_of(asked.query or "")
    return Link(state=state, query=query_of(state), command=command_of(state))


def query_of(state: State) -> str:
    """The parameters of `state`."""
    return urlencode([*_own(state), *_values(state), *_locked(state)], quote_via=quote, safe=",")


def command_of(state: State) -> str:
    """The command line that plans `state`; a config.json stands in the current folder."""
    words = ["trigrid", "plan", *([state.model] if state.model else [])]
    for name, text in (*_own(state), *_values(state)):
        if name == "config":
            words.append(CONFIG_NAME)
        elif name == "expandable-segments":
            words.append(f"--{name}")
        elif name != "model":
            words += [f"--{name}", text]
    return shlex.join(words)


def state_of(query: str) -> State:
    """The state of a query. Raises Refused."""
    if len(query) > LONGEST:
        raise Refused([Problem("query", f"{query[:20]}…", f"is longer than {LONGEST:,} characters")])
    try:
        pairs = parse_qsl(
            query.lstrip("#?"), keep_blank_values=True, strict_parsing=bool(query), max_num_fields=MOST_PAIRS
        )
    except ValueError as error:
        raise Refused([Problem("query", f"{query[:20]}…", str(error))]) from None
    own: dict[str, Any] = {}
    values: dict[str, Value] = {}
    for name, text in pairs:
        if name in OWN:
            own |= _read(name, text)
        else:
            key = _key(name)
            values[".".join(key)] = value_of(key, text)
    return State(**own, values=values)


def _own(state: State) -> Iterator[tuple[str, str]]:
    if state.model:
        yield "model", state.model
    if state.params:
        yield "params", state.params
    if state.config is not None:
        text = json.dumps(state.config, separators=(",", ":"))
        yield "config", urlsafe_b64encode(text.encode()).decode().rstrip("=")
    if state.gpus is not None:
        yield "gpus", str(state.gpus)
    if state.software != State.software:
        yield "software", state.software
    if state.policy is not None:
        yield "policy", state.policy
    if state.expandable_segments:
        yield "expandable-segments", "true"
    if state.tokens != State.tokens:
        yield "tokens", state.tokens


def _values(state: State) -> Iterator[tuple[str, str]]:
    for key, value in state.values.items():
        text = value if isinstance(value, str) else one_line(value)
        # A string that reads as another value keeps its quotes.
        if isinstance(value, str) and value_of(tuple(key.split(".")), text) != value:
            text = one_line(value)
        yield SHORT_NAMES.get(key, key), text


def _locked(state: State) -> Iterator[tuple[str, str]]:
    if state.locked:
        yield "locked", ",".join(SHORT_NAMES.get(key, key) for key in state.locked)


def _key(name: str) -> tuple[str, ...]:
    plain = name.replace("-", "_")
    return SHORT_FLAGS.get(plain) or tuple(plain.split("."))


def _read(name: str, text: str) -> dict[str, object]:
    match name:
        case "gpus":
            if not (text.isascii() and text.isdigit() and len(text) < 20):
                raise Refused([Problem("gpus", text, "a whole number is needed")])
            return {"gpus": int(text)}
        case "expandable-segments":
            if text not in ("true", "false"):
                raise Refused([Problem(name, text, "true or false is needed", ("true", "false"))])
            return {"expandable_segments": text == "true"}
        case "locked":
            return {"locked": tuple(".".join(_key(word)) for word in text.split(",") if word)}
        case "config":
            return {"config": _config(text)}
    return {name: text}


def _config(text: str) -> dict[str, object]:
    try:
        values = parse(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:
        raise Refused([Problem("config", f"{text[:20]}…", "is not base64url of a config.json")]) from None
    if not isinstance(values, dict):
        raise Refused([Problem("config", f"{text[:20]}…", "holds no JSON object")])
    return values
