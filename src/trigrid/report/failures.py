"""What ranks that fail leave in the folder of their run, and who failed first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ERRORS, STALLS = "errors", "stalls"
"""Folders of a run: a file for each rank that failed, and what ranks said when nothing went on any more."""
FIRST = "first.json"
"""Among the former, the same file as that of the rank that was first to leave one."""


@dataclass(frozen=True)
class Failure:
    """rank: who; when_s: Unix time; message: for a person; refused: a mistake of the user, found after the start; host:
    the node of the rank."""

    rank: int
    when_s: float
    message: str
    refused: bool
    trace: str
    host: str = ""


def failures(run_dir: Path) -> list[Failure]:
    """What the ranks that failed have left, the first first; nodes may have clocks that differ."""
    found = (_read(path) for path in sorted((run_dir / ERRORS).glob("rank-*.json")))
    return sorted((failure for failure in found if failure), key=lambda failure: failure.when_s)


def first_record(run_dir: Path) -> Failure | None:
    """What the rank that failed first has left, if any has left anything."""
    return next(iter(failures(run_dir)), None)


def first_left(run_dir: Path) -> Failure | None:
    """What was left first, by the disk rather than by clocks. One file is read where disks know links."""
    return _read(run_dir / ERRORS / FIRST) or first_record(run_dir)


def _read(path: Path) -> Failure | None:
    """None where it has gone: ranks are started again."""
    try:
        return Failure(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
