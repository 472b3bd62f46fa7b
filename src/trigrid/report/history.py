"""What metrics.jsonl tells of the steps before a run went on."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path

NAME = "metrics.jsonl"


def read_history(run_dir: Path, done: int) -> tuple[array[float], list[tuple[int, float]]]:
    """Losses of the first `done` steps, NaN where none was recorded, and (step, loss) of validations up to there. Of
    steps that were done again the last counts; a line that was not written to its end is passed over."""
    losses = array("d", [math.nan] * done)
    validation: dict[int, float] = {}
    path = run_dir / NAME
    for line in path.read_bytes().splitlines() if done and path.exists() else ():
        try:
            entry = json.loads(line)
            kind, step, loss = entry["kind"], entry.get("step", 0), entry.get("loss")
        except (ValueError, KeyError, TypeError):
            continue
        if loss is None or not 0 < step <= done:
            continue
        if kind == "step":
            losses[step - 1] = loss
        elif kind == "validation":
            validation[step] = loss
    return losses, sorted(validation.items())
