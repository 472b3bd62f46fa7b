"""From a corpus to token files, once: survey, tokenizer, tokens, in a cache folder named by what decides them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from trigrid.data.cache import build_once, cache_root
from trigrid.data.corpus import Document, Piece, read_pieces, survey
from trigrid.data.progress import Progress, watch
from trigrid.data.tokenizer import file_sha256, load_tokenizer, separator_id, train_tokenizer
from trigrid.data.tokens import TokenWriter, open_tokens
from trigrid.errors import Problem, Refused
from trigrid.spec.job import Data

FORMAT = 1
"""Raised whenever the same inputs would give other files than before."""
HASH_DIGITS = 16
CHUNK_CHARS_PER_CORE = 1 << 18
"""Text in flight for each core while tokenising: a quarter of a second of work and 10 MB of the library's results."""


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """A token file, `prefix.bin` and `prefix.idx`; `tokens` counts the separator at the end of each document too."""

    prefix: Path
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """hash: short SHA-256 of all that decides the files. validation: None where `validation_fraction` is 0.

    cached: the files were there already.
    """

    train: TokenSet
    validation: TokenSet | None
    tokenizer: Path
    hash: str
    cached: bool


def save(prepared: Prepared, path: Path) -> None:
    """Leave `prepared` as JSON for the other processes of a run."""
    path.write_bytes(TypeAdapter(Prepared).dump_json(prepared, indent=1))


def load(path: Path) -> Prepared:
    """What `save` left."""
    return TypeAdapter(Prepared).validate_json(path.read_bytes())


def prepare(data: Data, vocab: int, progress: Progress) -> Prepared:
    """Token files and a tokenizer for a model of `vocab` entries.

    A document belongs to the validation set by a hash of its content, whatever else is in the corpus; the tokenizer is
    trained on the others. A text that spells the separator is tokenised as ordinary characters. `progress` is called
    from this thread, about twice a second or more often.
    Raises Refused for a corpus, tokenizer, vocabulary, fraction or cache folder that cannot be used; then, as when the
    process is killed, no folder is left that a later call takes for a whole one.
    """
    _check_fraction(data.validation_fraction)
    given = None if data.tokenizer == "train" else Path(data.tokenizer).expanduser()
    if given:
        load_tokenizer(given, vocab)
    documents = survey(data.corpus, progress)
    validation = _validation_set(documents, data.validation_fraction)
    content = {
        "format": FORMAT,
        "documents": [(document.size_bytes, document.sha256) for document in documents],
        "vocab": vocab,
        "tokenizer": file_sha256(given) if given else "train",
        "library": tokenizers.__version__,
        "validation_fraction": data.validation_fraction,
    }
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:HASH_DIGITS]

    def build(folder: Path) -> None:
        path = folder / "tokenizer.json"
        if given:
            shutil.copyfile(given, path)
        else:
            training = [document for document in documents if document not in validation]
            _train(training, vocab, progress).save(str(path), pretty=False)
        _write_tokens(folder, documents, validation, load_tokenizer(path, vocab), vocab, progress)

    folder = cache_root(data.cache) / name
    cached = build_once(folder, build, progress)
    return Prepared(
        train=_token_set(folder / "train"),
        validation=_token_set(folder / "validation") if validation else None,
        tokenizer=folder / "tokenizer.json",
        hash=name,
        cached=cached,
    )


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction < 1:
        nearest = 0.5 if fraction >= 1 else 0.0
        raise Refused([Problem("data.validation_fraction", fraction, "must be at least 0 and below 1", (nearest,))])


def _validation_set(documents: Sequence[Document], fraction: float) -> frozenset[Document]:
    """The documents whose hash, read as a number in [0, 1), lies below `fraction`.

    Raises Refused where a set is empty that should not be.
    """
    places = [int(document.sha256[:13], 16) / 16**13 for document in documents]
    chosen = [document for document, place in zip(documents, places, strict=True) if place < fraction]
    if fraction > 0 and not 0 < len(chosen) < len(documents):
        nearest = math.floor(max(places) * 10_000) / 10_000 if chosen else math.ceil(min(places) * 10_000) / 10_000
        legal = (nearest, 0.0) if 0 < sum(place < nearest for place in places) < len(places) else (0.0,)
        reason = f"puts {len(chosen)} of {len(documents)} documents into the validation set; neither set may be empty"
        raise Refused([Problem("data.validation_fraction", fraction, reason, legal)])
    return frozenset(chosen)


def _train(documents: Sequence[Document], vocab: int, progress: Progress) -> Tokenizer:
    total_bytes = sum(document.size_bytes for document in documents)
    done_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal done_bytes
        for piece in read_pieces(documents):
            yield piece.text
            done_bytes += len(piece.text.encode())

    def tick() -> None:
        progress("training the tokenizer (bytes read)", done_bytes, total_bytes)

    tick()
    return watch(lambda: train_tokenizer(texts(), vocab), tick)


def _write_tokens(
    folder: Path,
    documents: Sequence[Document],
    validation: frozenset[Document],
    tokenizer: Tokenizer,
    vocab: int,
    progress: Progress,
) -> None:
    separator = separator_id(tokenizer)
    tokenizer.encode_special_tokens = True
    total_bytes = sum(document.size_bytes for document in documents)
    done_bytes = 0
    with ExitStack() as stack:
        train = stack.enter_context(TokenWriter(folder / "train", vocab))
        held_out = stack.enter_context(TokenWriter(folder / "validation", vocab)) if validation else train
        for chunk in _chunks(read_pieces(documents)):
            progress("tokenising (bytes)", done_bytes, total_bytes)
            encodings = tokenizer.encode_batch_fast([piece.text for piece in chunk], add_special_tokens=False)
            for piece, encoding in zip(chunk, encodings, strict=True):
                writer = held_out if piece.document in validation else train
                writer.add(encoding.ids)
                if piece.last:
                    writer.add([separator])
                    writer.end_document()
                done_bytes += len(piece.text.encode())
        progress("tokenising (bytes)", done_bytes, total_bytes)


def _chunks(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    limit_chars = CHUNK_CHARS_PER_CORE * (os.cpu_count() or 1)
    chunk: list[Piece] = []
    chars = 0
    for piece in pieces:
        chunk.append(piece)
        chars += len(piece.text)
        if chars >= limit_chars:
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk


def _token_set(prefix: Path) -> TokenSet:
    file = open_tokens(prefix)
    return TokenSet(prefix=prefix, documents=file.document_count, tokens=len(file.tokens))
