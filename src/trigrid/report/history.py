"""What metrics.jsonl tells of the steps before a run went on."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

from trigrid.report.lines import read_lines

NAME = "metrics.jsonl"


def read_history(run_dir: Path, done: int) -> tuple[array[float], list[tuple[int, float]]]:
    """Losses of the first `done` steps, NaN where none was recorded, and (step, loss) of validations up to there. Of
    steps that were done again the last counts."""
    losses = array("d", [math.nan] * done)
    validation: dict[int, float] = {}
    for entry in read_lines(run_dir / NAME) if done else ():
        kind, step, loss = entry["kind"], entry.get("step", 0), entry.get("loss")
        if loss is None or not 0 < step <= done:
            continue
        if kind == "step":
            losses[step - 1] = loss
        elif kind == "validation":
            validation[step] = loss
    return losses, sorted(validation.items())
