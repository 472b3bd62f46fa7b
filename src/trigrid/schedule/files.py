"""Schedules as text: a row per action with the columns rank, kind, stage and microbatch, in each rank's order.

CSV has a header and the rows, JSON {"name": …, "actions": [{"rank": 0, "kind": "F", "stage": 0, "microbatch": 0}, …]}.
Ranks, stages and microbatches count from 0; kinds are F, B, I and W. The rows of different ranks may be mixed.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trigrid.errors import Problem, Refused
from trigrid.schedule.actions import Action, Kind, Schedule
from trigrid.schedule.validate import validate

COLUMNS = ("rank", "kind", "stage", "microbatch")
FORMATS = (".csv", ".json")

Row = tuple[str, dict[str, object]]
"""Where a row stands (`file:line`, or the file alone) and what is in it, by column."""


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write `schedule` to `path`, a .csv or .json file, aside first so that none is ever half there."""
    rows = [
        {"rank": rank, "kind": str(kind), "stage": stage, "microbatch": m}
        for rank, actions in enumerate(schedule.ranks)
        for kind, stage, m in actions
    ]
    if _format(path) == ".json":
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        text = f'{{\n  "name": {json.dumps(schedule.name)},\n  "actions": [\n{lines}\n  ]\n}}\n'
    else:
        text = "".join(f"{','.join(map(str, row))}\n" for row in (COLUMNS, *(row.values() for row in rows)))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def read_schedule(path: Path) -> Schedule:
    """The schedule for training in `path`, a .csv (named after the file) or .json file.

    Raises Refused where it cannot be read, where rows are no actions (all of them told, by line in a CSV), and where
    the actions are no schedule that can run.
    """
    form = _format(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(path, f"cannot be read: {error}") from error
    name, rows = (path.stem, list(_csv_rows(path, text))) if form == ".csv" else _json_rows(path, text)
    schedule = _assembled(path, name, rows)
    try:
        validate(schedule)
    except ValueError as error:
        raise _refused(path, f"cannot run: {error}") from error
    return schedule


def _format(path: Path) -> str:
    if path.suffix.lower() not in FORMATS:
        raise Refused([Problem("schedule", path, "not a kind of file that schedules are kept in", FORMATS)])
    return path.suffix.lower()


def _refused(path: Path, reason: str, where: str = "") -> Refused:
    return Refused([Problem("schedule", path, reason, where=where)])


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        if sorted(header) != sorted(COLUMNS):
            raise _refused(path, f"the first line must name the columns {','.join(COLUMNS)}", f"{path}:1")
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise _refused(path, f"{len(cells)} cells, not {len(header)}", where)
            yield where, dict(zip(header, map(str.strip, cells), strict=True))
    except csv.Error as error:
        raise _refused(path, f"is no CSV: {error}", f"{path}:{reader.line_num}") from error


def _json_rows(path: Path, text: str) -> tuple[str, list[Row]]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise _refused(path, f"is no JSON: {error.msg}", f"{path}:{error.lineno}") from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"is no JSON of a schedule: {error}") from error
    match content:
        case {"name": str(name), "actions": list(actions), **rest} if not rest:
            pass
        case _:
            raise _refused(path, 'must be {"name": …, "actions": […]}', f"{path}:1")
    for i, row in enumerate(actions):
        if not isinstance(row, dict) or sorted(row) != sorted(COLUMNS):
            raise _refused(path, f"actions[{i}] must have the keys {', '.join(COLUMNS)}", str(path))
    return name, [(f"{path}: actions[{i}]", row) for i, row in enumerate(actions)]


def _assembled(path: Path, name: str, rows: Sequence[Row]) -> Schedule:
    """The schedule of `rows`, its sizes and placement taken from them."""
    if not rows:
        raise _refused(path, "has no action")
    problems: list[Problem] = []
    placed: list[tuple[int, Action]] = []
    holders: dict[int, int] = {}
    for where, row in rows:
        found = [_number(row, column, where, len(rows), problems) for column in ("rank", "stage", "microbatch")]
        kind = row["kind"]
        if not isinstance(kind, str) or kind not in list(Kind):
            problems.append(Problem("kind", kind, "is no kind of action", tuple(map(str, Kind)), where))
            continue
        rank, stage, m = found
        if rank is None or stage is None or m is None:
            continue
        if holders.setdefault(stage, rank) != rank:
            problems.append(Problem("rank", rank, f"stage {stage} is on another rank", (holders[stage],), where))
        placed.append((rank, Action(Kind(kind), stage, m)))
    for column, used in (("stage", set(holders)), ("rank", set(holders.values()))):
        if not problems and len(used) <= max(used):
            unused = min(set(range(max(used))) - used)
            problems.append(Problem(column, unused, f"has no action, {column} {max(used)} has", where=str(path)))
    if problems:
        raise Refused(problems)
    ranks: list[list[Action]] = [[] for _ in range(max(holders.values()) + 1)]
    for rank, action in placed:
        ranks[rank].append(action)
    placement = tuple(holders[stage] for stage in range(len(holders)))
    microbatches = 1 + max(action.microbatch for _, action in placed)
    return Schedule(name, microbatches, placement, tuple(map(tuple, ranks)))


def _number(row: dict[str, object], column: str, where: str, rows: int, problems: list[Problem]) -> int | None:
    """The whole number in `column`, below that of the rows: a schedule uses every number up to its largest."""
    value = row[column]
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < rows:
        return value
    problems.append(Problem(column, value, f"must be a whole number from 0 to {rows - 1}", where=where))
    return None
