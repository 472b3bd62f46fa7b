"""Writing whole checkpoints in one process, one bounded piece after the other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trigrid.checkpoint.files import FileWriter, Header, write_text
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
    new_manifest,
    write_manifest,
)
from trigrid.checkpoint.manifest import NAME as MANIFEST
from trigrid.checkpoint.parts import entry_name, key_of
from trigrid.checkpoint.storage import SPARE_BYTES
from trigrid.errors import Problem, Refused, RunFailed

PIECE_BYTES = 16 << 20
"""About as much of a tensor is read and written at a time."""

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
    files = {
        rank: sorted(planned, key=lambda part: _header(part, source).order)
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
