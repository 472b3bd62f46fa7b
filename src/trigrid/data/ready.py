"""Entries of a corpus that are token files already: taken as they lie, never copied or read at the start of a job."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from trigrid.data.corpus import KEY, Entry
from trigrid.data.manifest import Recorded, is_prepared, read_manifest
from trigrid.data.sets import TokenSet
from trigrid.data.tokens import TokenFile, bin_path, idx_path, open_tokens
from trigrid.errors import Problem, Refused

PROBES = 16
PROBE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The sets of an entry, the hash of their content, and the tokenizer that it was made with, where known."""

    train: TokenSet
    validation: TokenSet | None
    hash: str
    tokenizer: Path | None
    tokenizer_sha256: str | None


def open_ready(entry: Entry, place: int, vocab: int, validation_fraction: float) -> Ready:
    """Where the entry has held-out documents of its own, they are the validation set, whatever the fraction above 0;
    else the fewest documents at its end that have at least the fraction of its tokens.

    The recorded vocabulary must fit in a model of `vocab` entries. A file without a record is not searched for its
    largest id: `trigrid data inspect` does that.
    Raises Refused for files that are damaged, do not fit, or cannot be split.
    """
    assert entry.ready is not None
    folder = entry.ready if entry.ready.is_dir() else entry.ready.parent
    manifest = read_manifest(folder) if is_prepared(folder) else None
    if entry.ready.is_dir():
        assert manifest is not None
        if len(manifest.sets) > 1:
            prefixes = tuple(str(folder / one.train.name) for one in manifest.sets)
            reason = f"holds the token files of {len(manifest.sets)} corpora; name one of them"
            raise Refused([Problem(KEY, entry.name, reason, prefixes)])
        record: Recorded | None = manifest.sets[0].train
        held_out = manifest.sets[0].validation
    else:
        names = [one for both in manifest.sets for one in (both.train, both.validation)] if manifest else []
        record, held_out = next((one for one in names if one and one.name == entry.ready.name), None), None
        if record is None:
            manifest = None
    prefix = folder / record.name if record else entry.ready
    if manifest and manifest.vocab > vocab:
        reason = f"{KEY} = {entry.name} has token ids up to {manifest.vocab - 1}"
        raise Refused([Problem("model.vocab", vocab, reason, (manifest.vocab,))])

    file = open_tokens(prefix)
    train, validation, content = (
        whole_set(file, place, entry.name),
        None,
        record.sha256 if record else _fingerprint(prefix),
    )
    if validation_fraction > 0 and held_out:
        validation = whole_set(open_tokens(folder / held_out.name), place, entry.name)
        content += held_out.sha256
    elif validation_fraction > 0:
        train, validation = _split(file, entry, place, validation_fraction)
        content += f" split at {train.stop_document}"
    return Ready(
        train=train,
        validation=validation,
        hash=hashlib.sha256(content.encode()).hexdigest(),
        tokenizer=folder / manifest.tokenizer if manifest else None,
        tokenizer_sha256=manifest.tokenizer_sha256 if manifest else None,
    )


def whole_set(file: TokenFile, entry: int, name: str) -> TokenSet:
    """All documents of a token file."""
    return _range(file, 0, file.document_count, entry, name)


def _range(file: TokenFile, first: int, stop: int, entry: int, name: str) -> TokenSet:
    return TokenSet(
        prefix=file.prefix,
        documents=stop - first,
        tokens=file.begins(stop) - file.begins(first),
        first_document=first,
        stop_document=stop,
        entry=entry,
        name=name,
    )


def _split(file: TokenFile, entry: Entry, place: int, fraction: float) -> tuple[TokenSet, TokenSet]:
    tokens, documents = len(file.tokens), file.document_count
    # The last place where the documents from there on are enough.
    at = bisect_right(range(documents), -fraction * tokens, key=lambda document: file.begins(document) - tokens) - 1
    train = _range(file, 0, at, place, entry.name)
    validation = _range(file, at, documents, place, entry.name)
    if train.tokens == 0 or validation.tokens == 0:
        most = math.floor((tokens - file.begins(min(1, documents))) / tokens * 10_000) / 10_000
        reason = f"leaves no document of {entry.name} to train on: the last that hold this share of its tokens are all"
        raise Refused([Problem("data.validation_fraction", fraction, reason, (most, 0.0) if most else (0.0,))])
    return train, validation


def _fingerprint(prefix: Path) -> str:
    """Of a file without a record: its size and the bytes at some places. Any other corpus differs there; a change of
    single tokens may not show."""
    digest = hashlib.sha256()
    for path in (bin_path(prefix), idx_path(prefix)):
        size_bytes = path.stat().st_size
        digest.update(f"{size_bytes} bytes".encode())
        with path.open("rb") as file:
            for number in range(PROBES):
                file.seek(max(0, size_bytes - PROBE_BYTES) * number // (PROBES - 1))
                digest.update(file.read(PROBE_BYTES))
    return digest.hexdigest()
