"""What a job trains on and is validated on, as the token files that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """Documents [first_document, stop_document) of the token file `prefix.bin` and `prefix.idx`.

    documents and tokens count those of the range, with the separator at the end of each document. entry: place in
    `data.corpus`, of the first where several entries are one set; `data.weights` has the same places. name: of all its
    entries.
    """

    prefix: Path
    documents: int
    tokens: int
    first_document: int
    stop_document: int
    entry: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """train: one for each separate set, in the order of the entries. validation: of those sets that have any.

    tokenizer: None where the corpus is ready tokens that do not say. hash: short SHA-256 of all the sets' content.
    cached: the files were there already.
    """

    train: tuple[TokenSet, ...]
    validation: tuple[TokenSet, ...]
    tokenizer: Path | None
    hash: str
    cached: bool


def save(prepared: Prepared, path: Path) -> None:
    """Leave `prepared` as JSON for the other processes of a run."""
    path.write_bytes(TypeAdapter(Prepared).dump_json(prepared, indent=1))


def load(path: Path) -> Prepared:
    """What `save` left."""
    return TypeAdapter(Prepared).validate_json(path.read_bytes())
