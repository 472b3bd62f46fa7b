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
from dataclasses import dataclass, fields
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any

from trigrid.errors import Problem, Refused
from trigrid.job.keys import Key, Table, choices, key_names, key_types, takes_array, type_of
from trigrid.job.spellings import is_section_elsewhere, meaning_elsewhere
from trigrid.spec.batch import NOT_GIVEN
from trigrid.spec.job import Job

ENV_PREFIX = "TRIGRID_"
SHORT_FLAGS = {
    **{name: ("parallel", name) for name in ("tp", "pp", "cp", "dp", "ep", "zero", "schedule", "recompute")},
    "virtual": ("parallel", "virtual_stages"),
    **{name: ("batch", name) for name in ("global_batch", "micro_batch", "accumulation")},
    "seq": ("batch", "sequence"),
    **{name: ("run", name) for name in ("steps", "seed", "precision", "device", "out")},
    "trace": ("run", "trace_step"),
    "lr": ("optimizer", "lr"),
    "on_nan": ("faults", "on_nan"),
    **{name: ("cluster", name) for name in ("gpu", "price")},
}
BARE_KEY = re.compile(r"[\w.\"' \t-]+")


@dataclass(frozen=True)
class Setting:
    """A value and the place that gave it: a `file:line`, an environment variable or a flag."""

    value: Any
    where: str


@dataclass(frozen=True)
class Document:
    """A job file as it was parsed. places: of its keys and tables, and of the whole under ()."""

    table: Table
    places: Mapping[Key, str]


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


def read_sources(document: Document, arguments: Sequence[str], env: Mapping[str, str]) -> Given:
    """What the job file, the variables of `env` and the flags of `arguments` give; each replaces those before it."""
    places = dict(document.places)
    problems: list[Problem] = []
    settings: dict[Key, Setting] = {}
    for source in (_from_file(document), _from_environment(env), _from_flags(arguments, problems)):
        for key, setting in source:
            settings |= _accept(key, setting, problems)
    places |= {key: setting.where for key, setting in settings.items()}
    return Given(_nest(settings), places, tuple(problems))


def read_document(path: Path) -> Document:
    """The job file `path`. Raises Refused where it cannot be read as TOML."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        siblings = get_close_matches(path.name, [file.name for file in path.parent.glob("*.toml")])
        legal = [str(path.parent / name) for name in siblings]
        raise _unreadable(str(path), "there is no such file", legal=legal) from error
    except IsADirectoryError as error:
        legal = sorted(map(str, path.glob("*.toml")))[:3]
        raise _unreadable(str(path), "is a folder, not a file", legal=legal) from error
    except OSError as error:
        raise _unreadable(str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _unreadable(str(path), f"not TOML: {error}") from error
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> Document:
    """The job file that `text` is, called `name` in messages. Raises Refused where it is no TOML."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Its message ends in "(at line 3, column 5)" or "(at end of document)".
        line = re.search(r"\(at line (\d+)", str(error))
        raise _unreadable(name, f"not TOML: {error}", int(line[1]) if line else text.count("\n") + 1) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(name, f"not TOML: {error}") from error
    if not table:
        raise _unreadable(name, "the file is empty; a job needs at least [model], [batch] and [run]")
    return Document(table, _lines(text, name))


def _unreadable(name: str, reason: str, line: int | None = None, legal: Iterable[str] = ()) -> Refused:
    return Refused([Problem("job", name, reason, tuple(legal), f"{name}:{line}" if line else "")])


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


def _from_file(document: Document) -> Iterator[tuple[Key, Setting]]:
    for key, value in _branches(document.table, key_types()):
        yield key, Setting(value, _place(key, document.places))


def _from_environment(env: Mapping[str, str]) -> Iterator[tuple[Key, Setting]]:
    for name, text in sorted(env.items()):
        if name.startswith(ENV_PREFIX):
            key = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
            yield key, Setting(value_of(key, text), name)


def _from_flags(arguments: Sequence[str], problems: list[Problem]) -> Iterator[tuple[Key, Setting]]:
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            reason = "--key value or --key=value is expected"
            problems.append(Problem("argument", flag + equals + text, reason, where="command line"))
            continue
        name = flag.removeprefix("--").replace("-", "_")
        key = SHORT_FLAGS.get(name) or tuple(name.split("."))
        if not equals and (not rest or rest[0].startswith("--")):
            reason = "the flag needs a value" if type_of(key) is not None else _unknown(key)[0]
            problems.append(Problem(".".join(key), NOT_GIVEN, reason, where=flag))
            continue
        yield key, Setting(value_of(key, text if equals else rest.pop(0)), flag)


def value_of(key: Key, text: str) -> Any:
    """`text` as a TOML value, or as the string it is where it is none or where `key` takes a string; words between
    commas are an array where `key` takes one of words."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        words = text.split(",")
        several = len(words) > 1 and choices(type_of(key)) and takes_array(type_of(key))
        return [word.strip() for word in words] if several else text
    takes_string = type_of(key) is str and not isinstance(parsed["value"], str)
    return text if takes_string or len(parsed) != 1 else parsed["value"]


def _branches(table: Table, types: Table, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Keys and values of `table`, going down only where `types` or another tool does; an empty table is a value."""
    for name, value in table.items():
        key, inner = (*prefix, name), types.get(name)
        goes_down = isinstance(inner, dict) or (inner is None and is_section_elsewhere(key))
        if goes_down and isinstance(value, dict) and value:
            yield from _branches(value, inner or {}, key)
        else:
            yield key, value


def _accept(key: Key, setting: Setting, problems: list[Problem]) -> dict[Key, Setting]:
    """The settings that `setting` stands for, if its key is known and its value could be of the right kind."""
    type_, value = type_of(key), setting.value

    def refuse(reason: str, legal: tuple[object, ...] = ()) -> dict[Key, Setting]:
        problems.append(Problem(".".join(key), shown(value), reason, legal, setting.where))
        return {}

    if type_ is None:
        return refuse(*_unknown(key))
    if isinstance(type_, dict):
        if not isinstance(value, dict):
            return refuse("a table is needed")
        accepted = {key: setting} if not value else {}
        for below, inner in _branches(value, type_, key):
            accepted |= _accept(below, Setting(inner, setting.where), problems)
        return accepted
    values = value if isinstance(value, list) else [value]
    if fault := next(filter(None, map(_fault, values)), None):
        return refuse(fault)
    # Choices are compared here, with their types: true and 1.0 are equal to 1.
    legal = choices(type_)
    alien = [v for v in values if (type(v), v) not in [(type(choice), choice) for choice in legal]] if legal else []
    if alien:
        # A string that spells a number is told from the number that it is not.
        quoted = f': "{alien[0]}", a string' if isinstance(alien[0], str) and not isinstance(legal[0], str) else ""
        which = quoted or (f": {shown(alien[0])}" if value is not alien[0] else "")
        return refuse(f"no such choice{which}", legal)
    return {key: setting}


def _unknown(key: Key) -> tuple[str, tuple[str, ...]]:
    """Why nothing can be given for the unknown `key`, and the known keys that may be meant."""
    elsewhere = meaning_elsewhere(key)
    return ("there is no such key", _similar(key)) if not elsewhere else (f"there is no such key; {elsewhere}", ())


def _similar(key: Key) -> tuple[str, ...]:
    """Up to three known keys that look most like `key`, or whose last part looks most like its own."""

    def likeness(known: str) -> float:
        pairs = ((".".join(key), known), (key[-1], known.rpartition(".")[2]))
        return max(SequenceMatcher(None, a, b).ratio() for a, b in pairs)

    scores = {known: likeness(known) for known in key_names(key_types())}
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
