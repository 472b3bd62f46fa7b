"""What the file, the environment and the command line give, as one table with the place of each key.

A later source replaces single values of an earlier one:

    file                  [parallel] tp = 4
    environment           TRIGRID_PARALLEL__TP=4
    command line          --parallel.tp 4, --parallel.tp=4, or a short form: --tp 4
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trigrid.errors import Problem, Refused
from trigrid.spec.job import Job
from trigrid.spec.model import ModelSpec

Key = tuple[str, ...]
Table = dict[str, Any]

ENV_PREFIX = "TRIGRID_"
SHORT_FLAGS = {
    **{axis: ("parallel", axis) for axis in ("tp", "pp", "cp", "dp", "zero")},
    **{name: ("run", name) for name in ("steps", "seed", "precision", "device", "out")},
    "lr": ("optimizer", "lr"),
}
BARE_KEY = re.compile(r"[\w.\"' \t-]+")
NOT_GIVEN = "(not given)"


@dataclass(frozen=True)
class Setting:
    """A value and the place that gave it: a `file:line`, an environment variable or a flag."""

    value: Any
    where: str


@dataclass(frozen=True)
class Given:
    """tree: tables in tables, with every table that a job needs, if only empty; their values are not checked yet.
    places: where each key and table of the tree was given. problems: what was refused and is not in the tree.
    """

    tree: Table
    places: Mapping[Key, str]
    problems: tuple[Problem, ...]

    def place(self, dotted: str) -> str:
        """Where the key `dotted` was given, else the innermost table around it that was."""
        return _place(tuple(dotted.split(".")), self.places)


def read_sources(path: Path, arguments: Sequence[str], env: Mapping[str, str]) -> Given:
    """What the job file, the variables of `env` and the flags of `arguments` give, later ones replacing earlier ones.

    Raises Refused where the file cannot be read as TOML.
    """
    text, document = _read(path)
    places = _lines(text, str(path))
    problems: list[Problem] = []
    settings: dict[Key, Setting] = {}
    for source in (_from_file(document, places), _from_environment(env), _from_flags(arguments, problems)):
        for key, setting in source:
            settings |= _accept(key, setting, problems)
    places |= {key: setting.where for key, setting in settings.items()}
    return Given(_nest(settings), places, tuple(problems))


def _read(path: Path) -> tuple[str, Table]:
    def refuse(reason: str, line: int | None = None, legal: Iterable[str] = ()) -> Refused:
        return Refused([Problem("job", str(path), reason, tuple(legal), f"{path}:{line}" if line else "")])

    try:
        text = path.read_bytes().decode("utf-8-sig")
        document = tomllib.loads(text)
    except FileNotFoundError as error:
        siblings = get_close_matches(path.name, [file.name for file in path.parent.glob("*.toml")])
        raise refuse("there is no such file", legal=(str(path.parent / name) for name in siblings)) from error
    except IsADirectoryError as error:
        raise refuse("is a folder, not a file", legal=sorted(map(str, path.glob("*.toml")))[:3]) from error
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        # Its message ends in "(at line 3, column 5)" or "(at end of document)".
        line = re.search(r"\(at line (\d+)", str(error))
        raise refuse(f"not TOML: {error}", int(line[1]) if line else text.count("\n") + 1) from error
    except (ValueError, RecursionError) as error:
        raise refuse(f"not TOML: {error}") from error
    if not document:
        raise refuse("the file is empty; a job needs at least [model], [batch] and [run]")
    return text, document


def _lines(text: str, path: str) -> dict[Key, str]:
    """`path:line` of each table and key that begins a line of `text`; for () the path alone."""
    places: dict[Key, str] = {(): path}
    section: Key = ()
    for number, line in enumerate(text.split("\n"), start=1):
        header, name = line.lstrip(" \t[").partition("]")[0], line.partition("=")[0]
        if line.lstrip().startswith("[") and BARE_KEY.fullmatch(header):
            key = section = _split(header)
        elif name != line and BARE_KEY.fullmatch(name):
            key = (*section, *_split(name))
        else:
            continue
        # `parallel.tp = 2` is also the first that is heard of `parallel`; no key of a job has more than three parts.
        for n in range(1, min(len(key), 3) + 1):
            places.setdefault(key[:n], f"{path}:{number}")
    return places


def _split(dotted: str) -> Key:
    return tuple(part.strip(" \t\"'") for part in dotted.split("."))


def _place(key: Key, places: Mapping[Key, str]) -> str:
    """The place of `key`, else of the innermost table around it."""
    return next(places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in places)


def _from_file(document: Table, places: Mapping[Key, str]) -> Iterator[tuple[Key, Setting]]:
    for key, value in _branches(document, _schema(Job)):
        yield key, Setting(value, _place(key, places))


def _from_environment(env: Mapping[str, str]) -> Iterator[tuple[Key, Setting]]:
    for name, text in sorted(env.items()):
        if name.startswith(ENV_PREFIX):
            key = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
            yield key, Setting(_value(key, text), name)


def _from_flags(arguments: Sequence[str], problems: list[Problem]) -> Iterator[tuple[Key, Setting]]:
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            reason = "--key value or --key=value is expected"
            problems.append(Problem("argument", flag + equals + text, reason, where="command line"))
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                problems.append(Problem(flag.removeprefix("--"), NOT_GIVEN, "the flag needs a value", where=flag))
                continue
            text = rest.pop(0)
        name = flag.removeprefix("--").replace("-", "_")
        key = SHORT_FLAGS.get(name) or tuple(name.split("."))
        yield key, Setting(_value(key, text), flag)


def _value(key: Key, text: str) -> Any:
    """`text` as a TOML value, or as the string it is where it is none or where `key` takes a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    takes_string = _type(key) is str and not isinstance(parsed["value"], str)
    return text if takes_string or len(parsed) != 1 else parsed["value"]


@cache
def _schema(table: type) -> Table:
    """Names of `table`'s fields with their types, and with a schema of their own where they are tables."""
    schema: Table = {"config": str} if table is ModelSpec else {}
    for name, hint in get_type_hints(table).items():
        inner = next((t for t in (hint, *get_args(hint)) if is_dataclass(t)), None)
        schema[name] = _schema(inner) if isinstance(inner, type) else hint
    return schema


def _type(key: Key) -> Any:
    """The type of the field `key`, a schema where it is a table, None where there is no such field."""
    found: Any = _schema(Job)
    for name in key:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _names(schema: Table, prefix: str = "") -> Iterator[str]:
    for name, inner in schema.items():
        yield prefix + name
        if isinstance(inner, dict):
            yield from _names(inner, f"{prefix}{name}.")


def _branches(table: Table, schema: Table, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Keys and values of `table`, going down only where `schema` does; an empty table is a value."""
    for name, value in table.items():
        inner = schema.get(name)
        if isinstance(inner, dict) and isinstance(value, dict) and value:
            yield from _branches(value, inner, (*prefix, name))
        else:
            yield (*prefix, name), value


def _accept(key: Key, setting: Setting, problems: list[Problem]) -> dict[Key, Setting]:
    """The settings that `setting` stands for, if its key is known and its value could be of the right kind."""
    type_, value = _type(key), setting.value

    def refuse(reason: str, legal: tuple[object, ...] = ()) -> dict[Key, Setting]:
        problems.append(Problem(".".join(key), shown(value), reason, legal, setting.where))
        return {}

    if type_ is None:
        return refuse("there is no such key", _similar(key))
    if isinstance(type_, dict):
        if not isinstance(value, dict):
            return refuse("a table is needed")
        accepted = {key: setting} if not value else {}
        for below, inner in _branches(value, type_, key):
            accepted |= _accept(below, Setting(inner, setting.where), problems)
        return accepted
    # Literals are compared here, with their types: pydantic takes true and 1.0 for 1.
    if get_origin(type_) is Literal and (type(value), value) not in [(type(a), a) for a in get_args(type_)]:
        return refuse("no such choice", get_args(type_))
    fault = next(filter(None, map(_fault, value if isinstance(value, list) else [value])), None)
    return refuse(fault) if fault else {key: setting}


def _similar(key: Key) -> tuple[str, ...]:
    """Up to three known keys that look most like `key`, or whose last part looks most like its own."""

    def likeness(known: str) -> float:
        pairs = ((".".join(key), known), (key[-1], known.rpartition(".")[2]))
        return max(SequenceMatcher(None, a, b).ratio() for a, b in pairs)

    scores = {known: likeness(known) for known in _names(_schema(Job))}
    enough = max(0.7, *(score - 0.05 for score in scores.values()))
    return tuple(known for known in sorted(scores, key=lambda k: -scores[k])[:3] if scores[known] >= enough)


def _fault(value: object) -> str | None:
    """Why `value` is no single value of a job."""
    match value:
        case bool() | float():
            return None
        case int():
            return None if -(2**63) <= value < 2**63 else "not a 64-bit number"
        case str():
            return None if not re.search("[\ud800-\udfff]", value) else "not valid text"
    return "an array of single values is needed" if isinstance(value, list) else "a single value is needed"


def shown(value: object) -> object:
    """`value` as an error may print it: Python refuses to print very long integers and very deep arrays."""
    match value:
        case bool():
            return str(value).lower()
        case int() if _fault(value):
            digits = f"{value:#x}"
            return digits if len(digits) <= 20 else f"{digits[:20]}…"
        case dict():
            return "{ }"
        case list():
            return [shown(v) if not isinstance(v, list) else "[ ]" for v in value]
    return value


def _nest(settings: Mapping[Key, Setting]) -> Table:
    """The settings as tables in tables, with every table that a job needs, if only empty."""
    tree: Table = {field.name: {} for field in fields(Job)}
    for key, setting in settings.items():
        table = tree
        for name in key[:-1]:
            table = table.setdefault(name, {})
        if isinstance(setting.value, dict):
            table.setdefault(key[-1], {})
        else:
            table[key[-1]] = setting.value
    return tree
