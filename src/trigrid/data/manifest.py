"""`data.json`: what a folder of token files holds, and what it was made of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from trigrid.data.tokens import write_through
from trigrid.errors import Problem, Refused

NAME = "data.json"
KIND = "trigrid token files"
FORMAT = 2
"""Raised whenever the same inputs would give other files than before."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """An entry of the corpus as it was given; bytes: of its files, 0 where they are not on this machine."""

    entry: str
    sources: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A token file, `name.bin` and `name.idx` in the folder; sha256: of both, one after the other."""

    name: str
    documents: int
    tokens: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Set:
    """The token files of one set of documents. Which entries of a corpus they are, the caller knows: the same folder
    serves entries at other places."""

    train: Recorded
    validation: Recorded | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """plan: SHA-256 of all that decides the files. tokenizer: its file in the folder. vocab: all ids are below it.

    empty_documents: left out, as they hold no text.
    """

    kind: str
    format: int
    trigrid: str
    plan: str
    inputs: tuple[Input, ...]
    text_key: str
    validation_fraction: float
    empty_documents: int
    tokenizer: str
    tokenizer_sha256: str
    library: str
    separator: int
    vocab: int
    dtype: str
    sets: tuple[Set, ...]


def is_prepared(folder: Path) -> bool:
    """Whether `trigrid data prepare`, or a job, made the folder; it gets its name only when it is whole."""
    try:
        with (folder / NAME).open("rb") as file:
            return KIND.encode() in file.read(100)
    except OSError:
        return False


def write_manifest(manifest: Manifest, folder: Path) -> None:
    with (folder / NAME).open("wb") as file:
        file.write((json.dumps(asdict(manifest), indent=1) + "\n").encode())
        write_through(file)


def read_manifest(folder: Path) -> Manifest:
    """Raises Refused where it is damaged or of another format."""
    from pydantic import TypeAdapter, ValidationError

    path = folder / NAME
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            reason = f"has format {found['format']}, and this version of trigrid reads {FORMAT}: prepare it again"
            raise Refused([Problem("token file", path, reason)])
        return TypeAdapter(Manifest).validate_python(found)
    except OSError as error:
        raise Refused([Problem("token file", path, f"cannot be read: {error.strerror}")]) from None
    except (ValueError, KeyError, TypeError, ValidationError):
        raise Refused([Problem("token file", path, "is damaged")]) from None
