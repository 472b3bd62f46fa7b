"""Writing safetensors files and whole checkpoints in one process, one bounded piece after the other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from trigrid.checkpoint.folder import aside, publish
from trigrid.checkpoint.manifest import (
    DTYPES,
    JOB,
    File,
    Format,
    Kind,
    State,
    Stored,
    StoredParameter,
    Stretch,
    flush,
    new_manifest,
    write_manifest,
)
from trigrid.checkpoint.manifest import NAME as MANIFEST
from trigrid.checkpoint.parts import entry_name, key_of
from trigrid.checkpoint.storage import SPARE_BYTES, write_text
from trigrid.errors import Problem, Refused, RunFailed

PIECE_BYTES = 16 << 20
"""About as much of a tensor is read and written at a time."""
HEADER_ALIGNMENT = 8

Progress = Callable[[str, int, int], None]
"""(phase, done, total)."""


class Source(Protocol):
    """Where the values of a checkpoint come from."""

    def format(self, name: str, kind: Kind) -> Format: ...

    def read(self, name: str, kind: Kind, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a parameter, in that format."""
        ...


@dataclass(frozen=True)
class Planned:
    """A box of `kind` of parameter `name` that a file will hold."""

    name: str
    kind: Kind
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def entry(self) -> str:
        """How it is called in its file."""
        return entry_name(key_of(self.name, self.kind), self.offsets)


@dataclass(frozen=True)
class Header:
    """A tensor of a file to be written."""

    name: str
    dtype: Format
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class FileWriter:
    """A safetensors file that is written from front to back. Use as a context manager, write every tensor in the order
    of `tensors`, in pieces of any size, then call `end`."""

    def __init__(self, path: Path, tensors: Sequence[Header], metadata: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._hasher = xxhash.xxh3_128()
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        at = 0
        for tensor in tensors:
            span = [at, at + tensor.bytes]
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
            at = span[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        self._missing = at
        self._bytes = 8 + len(text) + at
        self._file = path.open("wb")
        self._put(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def write(self, values: Tensor) -> None:
        """The next elements, on the host."""
        content = values.contiguous().flatten().view(torch.uint8).numpy()
        self._missing -= content.nbytes
        self._put(content.data)

    def end(self) -> File:
        """Down to the disk."""
        assert self._missing == 0, f"{self._path}: {self._missing} bytes are missing"
        flush(self._file)
        return File(self._path.name, self._bytes, self._hasher.hexdigest())

    def _put(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._hasher.update(content)


def bands(sizes: Sequence[int], itemsize: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) along the first dimension of the pieces of an array, each of about `piece_bytes`."""
    rows = max(1, piece_bytes // (prod(sizes[1:]) * itemsize))
    for start in range(0, sizes[0], rows):
        yield start, min(start + rows, sizes[0])


def check_new(path: Path, needed_bytes: int) -> None:
    """Raise Refused where `path` is there already, or its disk has no room for `needed_bytes`."""
    if os.path.lexists(path):
        raise Refused([Problem("DST", path, "is there already; trigrid replaces nothing")])
    if inside := next((parent for parent in path.absolute().parents if (parent / MANIFEST).exists()), None):
        raise Refused([Problem("DST", path, f"is inside the checkpoint {inside}, which that would damage")])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused([Problem("DST", path, f"cannot be made: {error.strerror}")]) from None
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes + SPARE_BYTES:
        reason = f"{needed_bytes / 1e9:.2f} GB are needed, and {free / 1e9:.2f} GB are free"
        raise Refused([Problem("DST", path, reason)])


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, which the body of the `with` fills and renames. It is removed again where that fails;
    raises RunFailed where the disk does."""
    folder = aside(path)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        yield folder
    except OSError as error:
        raise RunFailed(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_checkpoint(
    path: Path,
    files: Mapping[int, Sequence[Planned]],
    shapes: Mapping[str, tuple[int, ...]],
    source: Source,
    state: State,
    job_text: str,
    progress: Progress,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Write the checkpoint `path`, visible only when it is complete. files: what each rank's file holds, by the rank;
    shapes: of all parameters. Raises Refused where it is there already or there is no room."""
    # In the order of the library that ranks write with, so that their files are the same.
    files = {
        rank: sorted(
            planned,
            key=lambda part: (
                -_header(part, source).bytes // prod(part.sizes),
                part.entry,
            ),
        )
        for rank, planned in files.items()
        if planned
    }
    total = sum(_header(part, source).bytes for planned in files.values() for part in planned)
    check_new(path, total)
    with made_aside(path) as folder:
        written: list[File] = []
        done = 0
        for rank, planned in sorted(files.items()):
            headers = [_header(part, source) for part in planned]
            with FileWriter(folder / f"rank-{rank:05d}.safetensors", headers) as file:
                for part, header in zip(planned, headers, strict=True):
                    for values in _pieces(part, header, source, piece_bytes):
                        file.write(values)
                        done += values.nbytes
                        progress("writing (MB)", done // 1_000_000, total // 1_000_000)
                written.append(file.end())
        write_text(folder / JOB, job_text)
        tensors = _account(files, shapes, source)
        write_manifest(folder, new_manifest(state, tensors, tuple(written), job_text))
        publish(path)


def _header(part: Planned, source: Source) -> Header:
    return Header(part.entry, source.format(part.name, part.kind), part.sizes)


def _pieces(part: Planned, header: Header, source: Source, piece_bytes: int) -> Iterator[Tensor]:
    first, *others = part.offsets
    for start, stop in bands(part.sizes, DTYPES[header.dtype].itemsize, piece_bytes):
        yield source.read(part.name, part.kind, (first + start, *others), (stop - start, *part.sizes[1:]))


def _account(
    files: Mapping[int, Sequence[Planned]], shapes: Mapping[str, tuple[int, ...]], source: Source
) -> dict[str, StoredParameter]:
    parts: dict[tuple[str, Kind], list[Stretch]] = {}
    for number, rank in enumerate(sorted(files)):
        for part in files[rank]:
            parts.setdefault((part.name, part.kind), []).append((number, part.offsets, part.sizes))
    tensors = {name: StoredParameter(shape, {}) for name, shape in shapes.items()}
    for (name, kind), held in parts.items():
        tensors[name].kinds[kind] = Stored(source.format(name, kind), tuple(held))
    return tensors
