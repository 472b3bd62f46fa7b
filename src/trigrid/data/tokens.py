"""Token files: Megatron-LM's indexed format, `prefix.bin` (the tokens) and `prefix.idx` (where each sequence lies).

The index, little-endian and without padding:

    magic       9 bytes  "MMIDIDX" and two zeros
    version     uint64   1
    dtype       uint8    a key of `TOKEN_TYPES`
    sequences   uint64   S
    boundaries  uint64   D = documents + 1
    lengths     int32    × S, tokens of each sequence
    pointers    int64    × S, byte at which each sequence begins in `.bin`
    documents   int64    × D, first sequence of each document, and S at the end

A document is one sequence, or several where it has more tokens than an int32 counts. Here it ends with its separator
token, so that `.bin` as it lies is the stream that a model trains on.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trigrid.errors import Problem, Refused

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
UINT16, INT32 = 8, 4
LONGEST_SEQUENCE = 2**31 - 1

Tokens = NDArray[np.integer[Any]]


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def token_type(vocab: int) -> int:
    """The dtype code for ids below `vocab`: uint16 below 65,500 entries (Megatron's own bound), else int32."""
    return UINT16 if vocab < 65_500 else INT32


def dtype_code(dtype: np.dtype[Any]) -> int:
    """The code in `TOKEN_TYPES` of a token file's dtype."""
    return next(code for code, name in TOKEN_TYPES.items() if np.dtype(name) == dtype)


class TokenWriter:
    """Writes a token file as a stream, in memory that grows by 4 bytes per sequence and 8 per document.

    Both files are written under another name. Leaving the `with` block renames them, the index last, so that an index
    always belongs to a whole `.bin`; leaving it by an error removes them.
    """

    def __init__(self, prefix: Path, vocab: int, longest_sequence: int = LONGEST_SEQUENCE):
        self._prefix = prefix
        self._vocab = vocab
        self._longest_sequence = longest_sequence
        self._code = token_type(vocab)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._open_tokens = 0
        self._bin: BinaryIO

    def __enter__(self) -> TokenWriter:
        self._bin = _aside(bin_path(self._prefix)).open("wb")
        return self

    def add(self, ids: Sequence[int] | Tokens) -> None:
        """Appends tokens to the open document; every id is at least 0 and below `vocab`."""
        tokens = np.asarray(ids, dtype=np.int64)
        assert tokens.size == 0 or (tokens.min() >= 0 and tokens.max() < self._vocab), "token id out of range"
        self._bin.write(tokens.astype(TOKEN_TYPES[self._code]).tobytes())
        self._open_tokens += len(tokens)
        while self._open_tokens > self._longest_sequence:
            self._lengths.append(self._longest_sequence)
            self._open_tokens -= self._longest_sequence

    def end_document(self) -> None:
        if self._open_tokens:
            self._lengths.append(self._open_tokens)
            self._open_tokens = 0
        self._documents.append(len(self._lengths))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        targets = (bin_path(self._prefix), idx_path(self._prefix))
        try:
            if kind is None:
                assert self._open_tokens == 0, "a document was left open"
                write_through(self._bin)
                with _aside(targets[1]).open("wb") as index:
                    self._write_index(index)
                    write_through(index)
                targets[1].unlink(missing_ok=True)
                for target in targets:
                    _aside(target).replace(target)
        finally:
            self._bin.close()
            for target in targets:
                _aside(target).unlink(missing_ok=True)

    def _write_index(self, index: BinaryIO) -> None:
        lengths = np.asarray(self._lengths, dtype="<i4")
        item_bytes = np.dtype(TOKEN_TYPES[self._code]).itemsize
        pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * item_bytes
        index.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._documents)))
        for table in (lengths, pointers.astype("<i8"), np.asarray(self._documents, dtype="<i8")):
            index.write(table.tobytes())


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """A token file, memory-mapped. tokens: all sequences, one after the other [T]; of each sequence its length and the
    byte at which it begins, lengths [S] and pointers [S]; documents [D]."""

    prefix: Path
    tokens: Tokens
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]

    @property
    def document_count(self) -> int:
        return len(self.documents) - 1

    def begins(self, document: int) -> int:
        """The place in `tokens` where `document` begins; where all of them end for `document_count`."""
        sequence = int(self.documents[document])
        if sequence == len(self.pointers):
            return len(self.tokens)
        return int(self.pointers[sequence]) // self.tokens.itemsize


def open_tokens(prefix: Path) -> TokenFile:
    """Maps the token file at `prefix` after checking that index and tokens belong together.

    Raises Refused, naming the file, where one is missing, empty, truncated, foreign, or disagrees with the other.
    """
    idx, bin = idx_path(prefix), bin_path(prefix)
    idx_bytes, bin_bytes = _size_bytes(idx), _size_bytes(bin)
    if idx_bytes < HEADER.size:
        raise _bad(idx, f"is truncated: {idx_bytes} bytes, shorter than its header of {HEADER.size}")
    with idx.open("rb") as file:
        magic, version, code, sequences, boundaries = HEADER.unpack(file.read(HEADER.size))
    if magic != MAGIC:
        raise _bad(idx, f"is no token index: it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise _bad(idx, f"has format version {version}; known is {VERSION}")
    if code not in TOKEN_TYPES:
        raise _bad(idx, f"has dtype code {code}; codes of integers are {', '.join(map(str, TOKEN_TYPES))}")
    expected_bytes = HEADER.size + 12 * sequences + 8 * boundaries
    if idx_bytes != expected_bytes:
        state = "is truncated" if idx_bytes < expected_bytes else "is longer than its tables"
        raise _bad(idx, f"{state}: {idx_bytes} bytes; {sequences} sequences, {boundaries} boundaries: {expected_bytes}")
    if sequences == 0 or boundaries == 0:
        raise _bad(idx, "holds no document")

    table = np.memmap(idx, dtype=np.uint8, mode="r")
    lengths = np.frombuffer(table, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(table, "<i8", sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(table, "<i8", boundaries, HEADER.size + 12 * sequences)
    item_bytes = np.dtype(TOKEN_TYPES[code]).itemsize
    tokens = int(lengths.sum(dtype=np.int64))
    if int(pointers[0]) != 0 or int(pointers[-1]) != (tokens - int(lengths[-1])) * item_bytes:
        raise _bad(idx, "is damaged, or its sequences do not lie one after the other")
    if documents[0] != 0 or documents[-1] != sequences:
        raise _bad(idx, f"is damaged: documents of sequences {documents[0]} to {documents[-1]}, not 0 to {sequences}")
    if tokens == 0:
        raise _bad(idx, "holds no token")
    if bin_bytes != tokens * item_bytes:
        state = "is truncated" if bin_bytes < tokens * item_bytes else "is longer than its index says"
        raise _bad(bin, f"{state}: {bin_bytes} bytes; {tokens} tokens of {item_bytes} bytes: {tokens * item_bytes}")
    mapped = np.memmap(bin, dtype=TOKEN_TYPES[code], mode="r")
    return TokenFile(prefix=prefix, tokens=mapped, lengths=lengths, pointers=pointers, documents=documents)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def write_through(file: BinaryIO) -> None:
    """Returns when what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _size_bytes(path: Path) -> int:
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from None
    if size_bytes == 0:
        raise _bad(path, "is empty")
    return size_bytes


def _bad(path: Path, reason: str) -> Refused:
    return Refused([Problem("token file", path, reason)])
