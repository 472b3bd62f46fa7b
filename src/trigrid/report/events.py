"""events.jsonl: what happened to a run, from its first start to its end, over all its restarts.

One JSON object a line: `kind`, the Unix time `time_s`, and what belongs to the kind. Only ever appended to, by rank 0
and by the process that started the ranks.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from trigrid.report.console import Console

NAME = "events.jsonl"


class EventLog:
    """Appends to the events of the run in `run_dir`. It never stops a run: what cannot be written costs one warning."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / NAME
        self._warned = False

    def write(self, kind: str, **values: object) -> None:
        """`kind`, now, and `values`, in one write; a number that is not finite becomes null, which JSON has."""
        entry = {"kind": kind, "time_s": time.time(), **values}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        try:
            _append(self._path, json.dumps(finite, allow_nan=False).encode() + b"\n")
        except (OSError, TypeError, ValueError) as error:
            if not self._warned:
                self._warned = True
                reason = error.strerror if isinstance(error, OSError) else error
                Console(quiet=True).warn(f"{self._path} cannot be written: {reason}; the run goes on without")


def _append(path: Path, line: bytes) -> None:
    """One write at the end of `path`. Opened each time: two processes write, and a folder may be moved."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(file).st_size
        # What was torn off before must not spoil this line too.
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        line = b"\n" + line if torn else line
        if os.write(file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a run, in the order in which they were written; none where nothing was. A line that a full disk or
    the end of a process has torn is left out."""
    path = run_dir / NAME
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "kind" in event:
            events.append(event)
    return events
