"""Files of tensors: safetensors, written from front to back, and read box by box."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trigrid.checkpoint.manifest import DTYPES, FORMATS, Damaged, File, Format, flush

HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Header:
    """A tensor of a file to be written."""

    name: str
    dtype: Format
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def order(self) -> tuple[int, str]:
        """Where it stands in a file: behind wider elements, so that each tensor begins at a multiple of its own."""
        return -DTYPES[self.dtype].itemsize, self.name


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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> File:
    """Write tensors on the host to a safetensors file, down to the disk."""
    headers = [Header(name, FORMATS[values.dtype], tuple(values.shape)) for name, values in tensors.items()]
    headers.sort(key=lambda header: header.order)
    with FileWriter(path, headers) as file:
        for header in headers:
            file.write(tensors[header.name])
        return file.end()


def opened(path: Path) -> Any:
    """A safetensors file, to be read in slices. Raises Damaged where it is none."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path}: cannot be read: {error}") from None


def write_text(path: Path, text: str) -> None:
    with path.open("wb") as file:
        file.write(text.encode())
        flush(file)
