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
from typing import NamedTuple

from trigrid.errors import Problem, Refused
from trigrid.schedule.actions import Action, Kind, Schedule
from trigrid.schedule.validate import validate

COLUMNS = ("rank", "kind", "stage", "microbatch")
FORMATS = (".csv", ".json")

Row = tuple[str, dict[str, object]]
"""Where a row stands (`file:line`, or the file alone) and what is in it, by column."""


class _File(NamedTuple):
    """key: what the user calls it."""

    path: Path
    key: str

    def refused(self, reason: str, where: str = "") -> Refused:
        return Refused([Problem(self.key, self.path, reason, where=where)])


def write_schedule(schedule: Schedule, path: Path, key: str = "schedule") -> None:
    """Write `schedule` to `path`, a .csv or .json file, aside first so that none is ever half there.

    Raises Refused, naming `key`, for another kind of file and where it cannot be written.
    """
    form = _format(path, key)
    rows = [
        {"rank": rank, "kind": str(kind), "stage": stage, "microbatch": m}
        for rank, actions in enumerate(schedule.ranks)
        for kind, stage, m in actions
    ]
    if form == ".json":
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        text = f'{{\n  "name": {json.dumps(schedule.name)},\n  "actions": [\n{lines}\n  ]\n}}\n'
    else:
        text = "".join(f"{','.join(map(str, row))}\n" for row in (COLUMNS, *(row.values() for row in rows)))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise _File(path, key).refused(f"cannot be written: {error.strerror}") from error


def read_schedule(path: Path, key: str = "schedule") -> Schedule:
    """The schedule for training in `path`, a .csv (named after the file) or .json file.

    Raises Refused, naming `key`, where it cannot be read, where rows are no actions (all of them told, by line in a
    CSV), and where the actions are no schedule that can run.
    """
    form, file = _format(path, key), _File(path, key)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise file.refused(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise file.refused("cannot be read: is no text in UTF-8") from error
    name, rows = (path.stem, list(_csv_rows(file, text))) if form == ".csv" else _json_rows(file, text)
    schedule = _assembled(file, name, rows)
    try:
        validate(schedule)
    except ValueError as error:
        raise file.refused(f"cannot run: {error}") from error
    return schedule


def _format(path: Path, key: str) -> str:
    if path.suffix.lower() not in FORMATS:
        raise Refused([Problem(key, path, "not a kind of file that schedules are kept in", FORMATS)])
    return path.suffix.lower()


def _csv_rows(file: _File, text: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        if sorted(header) != sorted(COLUMNS):
            raise file.refused(f"the first line must name the columns {','.join(COLUMNS)}", f"{file.path}:1")
        for cells in reader:
            where = f"{file.path}:{reader.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise file.refused(f"{len(cells)} cells, not {len(header)}", where)
            yield where, dict(zip(header, map(str.strip, cells), strict=True))
    except csv.Error as error:
        raise file.refused(f"is no CSV: {error}", f"{file.path}:{reader.line_num}") from error


def _json_rows(file: _File, text: str) -> tuple[str, list[Row]]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise file.refused(f"is no JSON: {error.msg}", f"{file.path}:{error.lineno}") from error
    except (ValueError, RecursionError) as error:
        raise file.refused(f"is no JSON of a schedule: {error}") from error
    match content:
        case {"name": str(name), "actions": list(actions), **rest} if not rest:
            pass
        case _:
            raise file.refused('must be {"name": …, "actions": […]}', f"{file.path}:1")
    for i, row in enumerate(actions):
        if not isinstance(row, dict) or sorted(row) != sorted(COLUMNS):
            raise file.refused(f"actions[{i}] must have the keys {', '.join(COLUMNS)}", str(file.path))
    return name, [(f"{file.path}: actions[{i}]", row) for i, row in enumerate(actions)]


def _assembled(file: _File, name: str, rows: Sequence[Row]) -> Schedule:
    """The schedule of `rows`, its sizes and placement taken from them."""
    if not rows:
        raise file.refused("has no action")
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
            problems.append(Problem(column, unused, f"has no action, {column} {max(used)} has", where=str(file.path)))
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
