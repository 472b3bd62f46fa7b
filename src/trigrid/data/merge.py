"""Parts of a token file, joined in order: in bounded memory, whatever their size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from trigrid.data.manifest import Recorded
from trigrid.data.tokens import HEADER, MAGIC, VERSION, bin_path, dtype_code, idx_path, open_tokens, write_through

BLOCK_BYTES = 1 << 23


def merge_tokens(parts: Sequence[Path], prefix: Path, advance: Callable[[int], None]) -> Recorded:
    """Writes the documents of all parts, of which none is empty, to `prefix.bin` and `prefix.idx`.

    The files are those that one writer would have written. `advance` is called with bytes of `.bin` as they are
    written. Raises Refused for a part that is damaged.
    """
    digest = hashlib.sha256()
    sequences, documents, tokens = 0, 0, 0
    with bin_path(prefix).open("wb") as file:
        for part in parts:
            opened = open_tokens(part)
            sequences += len(opened.lengths)
            documents += opened.document_count
            tokens += len(opened.tokens)
            for block in _file_blocks(bin_path(part)):
                file.write(block)
                digest.update(block)
                advance(len(block))
        write_through(file)
    header = HEADER.pack(MAGIC, VERSION, dtype_code(opened.tokens.dtype), sequences, documents + 1)
    with idx_path(prefix).open("wb") as file:
        for table in chain([header], _tables(parts)):
            file.write(table)
            digest.update(table)
        write_through(file)
    return Recorded(name=prefix.name, documents=documents, tokens=tokens, sha256=digest.hexdigest())


def sha256_of(prefix: Path, advance: Callable[[int], None]) -> str:
    """The hash of a token file, computed as `merge_tokens` does."""
    digest = hashlib.sha256()
    for path in (bin_path(prefix), idx_path(prefix)):
        for block in _file_blocks(path):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def _tables(parts: Sequence[Path]) -> Iterator[bytes]:
    """The three tables of the index, a part at a time."""
    for part in parts:
        yield open_tokens(part).lengths.tobytes()
    done_bytes = 0
    for part in parts:
        opened = open_tokens(part)
        yield (opened.pointers + np.int64(done_bytes)).astype("<i8").tobytes()
        done_bytes += opened.tokens.nbytes
    sequences = 0
    for part in parts:
        opened = open_tokens(part)
        yield (opened.documents[:-1] + np.int64(sequences)).astype("<i8").tobytes()
        sequences += len(opened.lengths)
    yield np.int64(sequences).astype("<i8").tobytes()


def _file_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
