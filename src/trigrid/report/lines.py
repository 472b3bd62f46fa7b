"""Files of one JSON object a line, whole lines whatever ends the process, which nothing but a disk ever shortens.

A file that cannot be written costs a warning, never the run.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class LineFile:
    """Appends to `path`; `warn` is told once where the disk takes no more."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        self._path, self._warn = path, warn
        self._warned = False

    def write(self, kind: str, /, **values: object) -> None:
        """`kind`, the Unix time and `values`, in one write; a number that is not finite becomes null."""
        entry = {"kind": kind, "time_s": time.time(), **values}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        try:
            _append(self._path, json.dumps(finite, allow_nan=False).encode() + b"\n")
        except (OSError, TypeError, ValueError) as error:
            if not self._warned:
                self._warned = True
                reason = error.strerror if isinstance(error, OSError) else error
                self._warn(f"{self._path} cannot be written: {reason}; the run goes on without")


def _append(path: Path, line: bytes) -> None:
    """One write at the end of `path`. Opened each time: two processes write, and a folder may be moved."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(file).st_size
        # What was torn off before must not spoil this line too.
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        line = b"\n" + line if torn else line
        if os.write(file, line) != len(line):
            os.ftruncate(file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a file in the order in which they were written; none where there is none. A line that a full disk
    or the end of a process has torn is left out."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "kind" in entry:
            yield entry
