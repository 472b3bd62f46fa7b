"""events.jsonl: what happened to a run, from its first start to its end, over all its restarts.

One JSON object a line: `kind`, the Unix time `time_s`, and what belongs to the kind. Only ever appended to, by rank 0
and by the process that started the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trigrid.report.console import Console
from trigrid.report.lines import LineFile, read_lines

NAME = "events.jsonl"


class EventLog(LineFile):
    """Appends to the events of the run in `run_dir`."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / NAME, Console(quiet=True).warn)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a run, in the order in which they were written."""
    return list(read_lines(run_dir / NAME))
