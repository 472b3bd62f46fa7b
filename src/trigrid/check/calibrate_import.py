"""Measurements that others made: tables that nccl-tests print, and a CSV of matrix products.

nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md): algbw is size ÷ time; busbw is algbw times 2 · (n − 1) ÷ n for an
all-reduce, (n − 1) ÷ n for an all-gather, a reduce-scatter and an all-to-all, 1 for sendrecv: the rate of the busiest
link. size is the whole array, as ours is. Tables say time in µs and bandwidths in GB/s, of 10⁹ bytes. Only size and
time are taken; busbw must agree with them and the number of ranks, else the table is not of what it seems to be.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from trigrid.check.calibrate_fit import fit_products, fit_wire
from trigrid.errors import Problem, Refused
from trigrid.plan.measured import NUMBER_FORMATS, Points, Products, Wire, WireKind
from trigrid.spec.cluster import Tier

# How the tests' programs and their lines call the collectives.
PROGRAMS: dict[str, WireKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "message",
}
NAMED = re.compile("|".join(PROGRAMS))
RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device")
HEADER = re.compile(r"#\s*nThread\s+(\d+)\s+nGpus\s+(\d+)")
COLUMNS = re.compile(r"#\s+size\s+count\s+type\b(.*)")
# Printed times have three or four digits.
CLOSE = 0.03
LEAST_POINTS = 2


@dataclass(frozen=True)
class Table:
    """What one table says: a collective of `ranks` ranks on `nodes` nodes. points: (bytes, seconds)."""

    kind: WireKind
    ranks: int
    nodes: int
    points: Points


def read_nccl_tests(text: str, name: str) -> Table:
    """The table that `text`, a file or a program's output called `name`, holds. Raises Refused with the line.

    The collective is that which the output names, else that of the file's name.
    """
    named = NAMED.search(text.partition("size")[0]) or NAMED.search(name)
    if not named:
        raise _refused(name, None, name, "neither the output nor the name says which collective it is", PROGRAMS)
    kind = PROGRAMS[named[0]]
    hosts: dict[int, str] = {}
    ranks, skip, points = 0, 3, []
    for number, line in enumerate(text.splitlines(), start=1):
        if found := RANK.search(line):
            hosts[int(found[1])] = found[2]
        elif found := HEADER.search(line):
            ranks = int(found[1]) * int(found[2])
        elif found := COLUMNS.search(line):
            # After size, count and type come redop and root where the collective has them, then time.
            skip = 3 + found[1].split().index("time") if "time" in found[1].split() else 3
        elif line.strip() and not line.lstrip().startswith("#") and line.split()[0].isdigit():
            points.append(_point(line, number, skip, kind, len(hosts) or ranks, name))
    ranks = len(hosts) or ranks
    if ranks < 2:
        raise _refused(name, None, ranks, "`# Rank N … on HOST device` or `# nThread … nGpus …` must give 2 or more")
    sound = tuple(point for point in points if point[0] > 0 and point[1] > 0)
    if len(sound) < LEAST_POINTS:
        raise _refused(name, None, len(sound), f"a table of at least {LEAST_POINTS} sizes is needed")
    return Table(kind, ranks, max(1, len(set(hosts.values()))), sound)


def _point(line: str, number: int, skip: int, kind: WireKind, ranks: int, name: str) -> tuple[float, float]:
    """Size and seconds of a line: size, count, type, …, time, algbw, busbw, #wrong."""
    words = line.split()
    try:
        size, time_s = float(words[0]), float(words[skip]) / 1e6
        algbw, busbw = float(words[skip + 1]), float(words[skip + 2])
    except (IndexError, ValueError):
        raise _refused(name, number, line.strip(), "size, count, type, …, time, algbw, busbw are expected") from None
    factor = {"all_reduce": 2 * (ranks - 1) / max(1, ranks), "message": 1.0}.get(kind, (ranks - 1) / max(1, ranks))
    # Bandwidths have two digits after the point: those of small sizes say nothing.
    if ranks > 1 and algbw > 1 and abs(busbw / algbw / factor - 1) > CLOSE:
        reason = f"busbw ÷ algbw is {busbw / algbw:.3f}, of {kind} with {ranks} ranks it is {factor:.3f}"
        raise _refused(name, number, f"{busbw:g}", reason)
    return size, time_s


def wire_of(table: Table) -> Wire:
    """The wire that the table measured, within a node or between nodes, which count as under one leaf."""
    apart = table.nodes > 1
    if table.kind == "message":
        # In sendrecv each rank sends to the next: of a node's ranks, the last crosses nodes.
        ranks, inside = 2, 1
    else:
        ranks, inside = table.ranks, table.ranks // table.nodes if apart else 1
    return fit_wire(table.kind, Tier.LEAF if apart else Tier.NVLINK, ranks, inside, table.points)


def read_gemms(text: str, name: str) -> dict[str, Products]:
    """Products by number format from a CSV with columns m, n, k, dtype and seconds or tflops. Raises Refused with the
    line of each mistake."""
    reader = csv.DictReader(text.splitlines())
    columns = {(column or "").strip().lower() for column in reader.fieldnames or ()}
    lacking = {"m", "n", "k", "dtype"} - columns
    if not columns & {"seconds", "tflops"}:
        lacking |= {"seconds"}
    if lacking:
        reason = f"columns m, n, k, dtype and seconds or tflops are needed; {', '.join(sorted(lacking))} is missing"
        raise _refused(name, 1, ",".join(sorted(columns)), reason)
    points: dict[str, list[tuple[float, ...]]] = {}
    problems = []
    for number, given in enumerate(reader, start=2):
        row = {(key or "").strip().lower(): (value or "").strip() for key, value in given.items() if key}
        spelled = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
        number_format = spelled.get(row["dtype"].lower(), row["dtype"].lower())
        if number_format not in NUMBER_FORMATS:
            problems.append(_problem(name, number, row["dtype"], "is no number format", NUMBER_FORMATS))
            continue
        try:
            m, n, k = (float(row[key]) for key in "mnk")
            seconds = float(row["seconds"]) if row.get("seconds") else 2e-12 * m * n * k / float(row["tflops"])
            sound = min(m, n, k, seconds) > 0 and isfinite(m * n * k * seconds)
        except (KeyError, ValueError, ZeroDivisionError):
            sound = False
        if sound:
            points.setdefault(number_format, []).append((m, n, k, seconds))
        else:
            problems.append(_problem(name, number, ",".join(row.values()), "numbers above 0 are needed"))
    if problems or not points:
        raise Refused(problems or [_problem(name, None, name, "there is no product in it")])
    return {number_format: fit_products(tuple(rows)) for number_format, rows in points.items()}


def read_text(path: Path, key: str) -> str:
    """The text of a file that a flag names."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Refused([Problem(key, path, f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise Refused([Problem(key, path, "is no text")]) from None


def _problem(name: str, line: int | None, value: object, reason: str, legal: Iterable[str] = ()) -> Problem:
    where = f"{name}:{line}" if line else name
    return Problem("calibrate", value, reason, tuple(legal), where)


def _refused(name: str, line: int | None, value: object, reason: str, legal: Iterable[str] = ()) -> Refused:
    return Refused([_problem(name, line, value, reason, legal)])
