"""What a checkpoint holds, as its manifest.json tells: state, tensors, and the files with their digests.

A digest finds damage, not malice: xxh3 of 128 bits, several times as fast as a disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import IO, Literal

import torch
import xxhash
from pydantic import TypeAdapter, ValidationError

import trigrid
from trigrid.errors import TrigridError

FORMAT = "trigrid checkpoint 1"
NAME = "manifest.json"
JOB = "job.toml"
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
READ_BYTES = 1 << 22

Kind = Literal["weight", "mean", "square"]
"""The master weight, and AdamW's first and second moment."""
Format = Literal["F64", "F32", "BF16", "F16"]
DTYPES: dict[Format, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
FORMATS = {dtype: name for name, dtype in DTYPES.items()}
Stretch = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(number of the file, offsets, sizes) of a box."""


class Damaged(TrigridError):
    """A checkpoint that is incomplete, damaged or not trigrid's; the message names the file and what differs."""


@dataclass(frozen=True)
class State:
    """Where a run stands.

    step: optimizer steps done; consumed: samples drawn, of all ranks; updates: steps in which weights changed; skipped:
    ranges of samples that are passed over; rewinds: times that the run went back; data: hash of what it trains on;
    recent: losses that a spike is judged by.
    All randomness is a function of the job's seed and of places, so that there is no more to it.
    """

    step: int = 0
    consumed: int = 0
    updates: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    rewinds: int = 0
    data: str = ""
    recent: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stored:
    """A tensor in files: its number format, and the boxes that make it up."""

    dtype: Format
    parts: tuple[Stretch, ...]


@dataclass(frozen=True)
class StoredParameter:
    """The global shape of a parameter, and what is stored of it."""

    shape: tuple[int, ...]
    kinds: dict[Kind, Stored]


@dataclass(frozen=True)
class File:
    """A file of the checkpoint, by its plain name."""

    name: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The whole of a checkpoint. job: the digest of its job.toml."""

    format: str
    trigrid: str
    state: State
    tensors: dict[str, StoredParameter]
    files: tuple[File, ...]
    job: str

    def stored(self) -> Iterator[tuple[str, Kind, StoredParameter, Stored]]:
        """(parameter, kind, …) of every tensor."""
        for name, parameter in self.tensors.items():
            for kind, stored in parameter.kinds.items():
                yield name, kind, parameter, stored

    @property
    def trained(self) -> bool:
        """Whether it has moments; an imported one has weights alone."""
        return any(kind != "weight" for _, kind, _, _ in self.stored())

    @property
    def bytes(self) -> int:
        """Of all files of tensors."""
        return sum(file.bytes for file in self.files)


def new_manifest(
    state: State, tensors: Mapping[str, StoredParameter], files: tuple[File, ...], job_text: str
) -> Manifest:
    """The manifest of a checkpoint that this version writes."""
    return Manifest(FORMAT, trigrid.__version__, state, dict(tensors), files, digest(job_text.encode()))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = _canonical(asdict(manifest))
    with (folder / NAME).open("wb") as file:
        file.write(b'{"digest": "%s",\n"body": %s}\n' % (digest(body).encode(), body))
        flush(file)


def read_manifest(folder: Path) -> Manifest:
    """Raises Damaged where it is missing, damaged, of another format, or names what cannot be."""
    path = folder / NAME
    if not folder.is_dir():
        raise Damaged(f"{folder}: there is no such folder")
    try:
        found = json.loads(path.read_bytes())
        told, body = found["digest"], found["body"]
        form, canonical = body["format"], _canonical(body)
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing, so that this is no complete checkpoint of trigrid") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{path}: is damaged: it is no manifest") from None
    if form != FORMAT:
        raise Damaged(f"{path}: has format {form!r}, and this version of trigrid reads {FORMAT!r}")
    if told != digest(canonical):
        raise Damaged(f"{path}: is damaged: its digest is another")
    try:
        # JSON has arrays for tuples.
        manifest: Manifest = _adapter().validate_json(canonical, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(f"{path}: {where}: {first['msg']}") from None
    if fault := next(_faults(manifest), None):
        raise Damaged(f"{path}: {fault}")
    return manifest


def read_job(folder: Path, manifest: Manifest) -> str:
    """The text of the checkpoint's job.toml. Raises Damaged where it is not the one that was written."""
    path = folder / JOB
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror}") from None
    if digest(text) != manifest.job:
        raise Damaged(f"{path}: is damaged: its digest is another than the manifest's")
    return text.decode()


def check_file(folder: Path, file: File) -> str | None:
    """What is wrong with a file, by its size and digest; None: nothing."""
    path = folder / file.name
    try:
        size = path.stat().st_size
        if size != file.bytes:
            return f"{path}: has {size:,} bytes, and {file.bytes:,} were written"
        if digest_of(path) != file.digest:
            return f"{path}: is damaged: its digest is another than the manifest's"
    except FileNotFoundError:
        return f"{path}: is missing"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    return None


def strangers(folder: Path, manifest: Manifest) -> list[str]:
    """What lies in the folder and is not the checkpoint's: a pickle, for one, which would run code if it were read."""
    own = {NAME, JOB, *(file.name for file in manifest.files)}
    return sorted(path.name for path in folder.iterdir() if path.name not in own)


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def digest_of(path: Path) -> str:
    """The digest of a file's content."""
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def flush(file: IO[bytes]) -> None:
    """Bring what was written to `file` to the disk."""
    file.flush()
    os.fsync(file.fileno())


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _faults(manifest: Manifest) -> Iterator[str]:
    """What a sound manifest cannot say."""
    names = [file.name for file in manifest.files]
    for name in names:
        if not FILE_NAME.fullmatch(name):
            yield f"the file name {name!r} is none that trigrid writes"
    if len(set(names)) < len(names):
        yield "two files have the same name"
    for name, kind, parameter, stored in manifest.stored():
        volume = 0
        for number, offsets, sizes in stored.parts:
            inside = len(offsets) == len(sizes) == len(parameter.shape) and all(
                offset >= 0 < size and offset + size <= whole
                for offset, size, whole in zip(offsets, sizes, parameter.shape, strict=True)
            )
            if not inside or not 0 <= number < len(names):
                yield f"{name}: part {offsets}, {sizes} of file {number} is not inside {parameter.shape}"
            volume += prod(sizes)
        if volume != prod(parameter.shape):
            yield f"{name}: parts of {kind} have {volume:,} elements together, and it has {prod(parameter.shape):,}"
