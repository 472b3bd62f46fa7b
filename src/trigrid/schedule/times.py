"""Durations as a CSV: a row per stage and kind of action, with the columns stage, kind and seconds.

Kinds are F, B, I and W as in schedules, and P: a message between this stage and the next, either way. Every stage has
F, and B or both I and W; a B that is missing takes as long as its halves, a P that is missing no time.
"""

from __future__ import annotations

import csv
import io
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from trigrid.errors import Problem, Refused
from trigrid.schedule.actions import Kind
from trigrid.schedule.replay import Durations

COLUMNS = ("stage", "kind", "seconds")
MESSAGE = "P"


class Times(NamedTuple):
    """halved: whether every stage gives I and W; else only a schedule of whole backwards can be played."""

    durations: Durations
    halved: bool


def read_durations(path: Path, stages: int) -> Times:
    """The times in `path` of a pipeline of `stages` stages. Raises Refused with everything that is wrong."""
    times = _rows(path, stages)
    problems: list[Problem] = []
    for stage in range(stages):
        halves = [kind in times[stage] for kind in (Kind.INPUT, Kind.WEIGHT)]
        if Kind.FORWARD not in times[stage]:
            problems.append(Problem("kind", "F", f"stage {stage} has no row of it", where=str(path)))
        if not all(halves) and (any(halves) or Kind.BACKWARD not in times[stage]):
            problems.append(Problem("kind", "B", f"stage {stage} has neither it nor both I and W", where=str(path)))
    if problems:
        raise Refused(problems)
    whole = [row.get(Kind.BACKWARD, row.get(Kind.INPUT, 0.0) + row.get(Kind.WEIGHT, 0.0)) for row in times]
    durations = Durations(
        forward_s=tuple(row[Kind.FORWARD] for row in times),
        backward_s=tuple(whole),
        input_s=tuple(row.get(Kind.INPUT, both) for row, both in zip(times, whole, strict=True)),
        weight_s=tuple(row.get(Kind.WEIGHT, 0.0) for row in times),
        p2p_s=tuple(row.get(MESSAGE, 0.0) for row in times[:-1]),
    )
    return Times(durations, all(Kind.INPUT in row for row in times))


def _rows(path: Path, stages: int) -> list[dict[str, float]]:
    """The seconds of each kind, by stage."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Refused([Problem("durations", path, f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise Refused([Problem("durations", path, "cannot be read: is no text in UTF-8")]) from error
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
    names = [name.strip() for name in reader.fieldnames or ()]
    if sorted(names) != sorted(COLUMNS):
        reason = f"the first line must name the columns {','.join(COLUMNS)}"
        raise Refused([Problem("durations", path, reason, where=f"{path}:1")])
    reader.fieldnames = names
    times: list[dict[str, float]] = [{} for _ in range(stages)]
    problems: list[Problem] = []
    kinds = (*map(str, Kind), MESSAGE)
    for row in reader:
        where = f"{path}:{reader.line_num}"
        stage, kind, seconds = ((row[name] or "").strip() for name in COLUMNS)
        last = stages - 2 if kind == MESSAGE else stages - 1
        if kind not in kinds:
            problems.append(Problem("kind", kind, "is no kind of action", kinds, where))
        elif not (stage.isascii() and stage.isdigit() and int(stage) <= last):
            problems.append(Problem("stage", stage, f"must be a whole number from 0 to {last}", where=where))
        elif (value := _number(seconds)) is None:
            problems.append(Problem("seconds", seconds, "must be a number of seconds from 0 on", where=where))
        elif kind in times[int(stage)]:
            problems.append(Problem("kind", kind, f"stage {stage} has a row of it already", where=where))
        else:
            times[int(stage)][kind] = value
    if problems:
        raise Refused(problems)
    return times


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None
