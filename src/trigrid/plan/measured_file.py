"""A calibration as a file: what `trigrid calibrate` writes and a job's `cluster.calibration` names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import lru_cache, partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from trigrid.errors import Problem, Refused
from trigrid.plan.constants import constants
from trigrid.plan.measured import (
    KINDS,
    NUMBER_FORMATS,
    OPERATIONS,
    Attention,
    Launch,
    Measured,
    Operation,
    Passes,
    Points,
    Products,
    Wire,
)
from trigrid.spec.cluster import Tier
from trigrid.spec.gpu import Gpu

FORMAT = "trigrid cluster 1"
KEY = "cluster.calibration"
TIERS = {tier.name.lower(): tier for tier in Tier if tier is not Tier.LOCAL}
HEADER = re.compile(r"\s*(\[\[?)\s*([\w.\"'-]+)\s*\]")
NAME = re.compile(r"\s*([\w\"'.-]+)\s*=")
# What may be 0; all other numbers are above it.
FROM_ZERO = {"seconds", "half_m", "half_n", "half_k", "half_sequence", "error", "hop_s", "power_w"}
POINT = {"products": 4, "attention": 6, "passes": 2, "operations": 2, "wires": 2}

T = TypeVar("T")
Key = tuple[str, ...]


def is_calibration(table: Mapping[str, object]) -> bool:
    """Whether `table` is a file's that `trigrid calibrate` wrote."""
    return str(table.get("format", "")).startswith(FORMAT.rpartition(" ")[0])


def load_measured(path: str) -> Measured:
    """The calibration of the file `path`. Raises Refused with the line of each mistake."""
    try:
        stat = Path(path).stat()
        return _load(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}; trigrid calibrate --out {path} makes one"
        raise Refused([Problem(KEY, path, reason)]) from None


@lru_cache(maxsize=8)
def _load(path: str, modified_ns: int, size: int) -> Measured:
    """As `load_measured`; the file as it is at that moment is read once."""
    try:
        return parse_measured(Path(path).read_text(encoding="utf-8"), path)
    except UnicodeDecodeError as error:
        raise Refused([Problem(KEY, path, f"not TOML: {error}")]) from None


def parse_measured(text: str, path: str) -> Measured:
    """The calibration that `text`, as the file `path`, describes. Raises Refused with the line of each mistake."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"\(at line (\d+)", str(error))
        place = f"{path}:{line[1]}" if line else path
        raise Refused([Problem(KEY, path, f"not TOML: {error}", where=place)]) from None
    reader = _Reader(path, _lines(text))
    found = reader.measured(table)
    if reader.problems:
        raise Refused(reader.problems)
    return found


def _lines(text: str) -> dict[Key, int]:
    """The line of each table and key; tables of an array are numbered from 0."""
    places: dict[Key, int] = {}
    section: Key = ()
    counts: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if header := HEADER.match(line):
            name = header[2]
            section = tuple(part.strip("\"'") for part in name.split("."))
            if header[1] == "[[":
                section = (*section, str(counts.get(name, 0)))
                counts[name] = counts.get(name, 0) + 1
            places.setdefault(section, number)
        elif name_ := NAME.match(line):
            places.setdefault((*section, name_[1].strip("\"'")), number)
    return places


class _Reader:
    """Reads tables into dataclasses and collects what is wrong with them."""

    def __init__(self, path: str, lines: Mapping[Key, int]):
        self.path, self.lines = path, lines
        self.problems: list[Problem] = []

    def fault(self, key: Key, value: object, reason: str, legal: tuple[object, ...] = ()) -> None:
        line = next((self.lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.lines), None)
        shown = "{ }" if isinstance(value, dict) else "[ ]" if isinstance(value, list) else value
        where = f"{self.path}:{line}" if line else self.path
        self.problems.append(Problem(".".join(key), shown, reason, legal, where))

    def measured(self, table: dict[str, Any]) -> Measured:
        if table.get("format") != FORMAT:
            reason = "is no calibration that this version reads"
            self.fault(("format",), table.get("format", "not given"), reason, (f'"{FORMAT}"',))
            return Measured()
        known = {"format", "provenance", "cluster", *_SECTIONS}
        for name in table.keys() - known:
            self.fault((name,), table[name], "there is no such table", tuple(sorted(known)))
        about = self.table(table, ("provenance",))
        cluster = self.table(table, ("cluster",))
        per_node = cluster.get("gpus_per_node")
        if per_node is not None and (type(per_node) is not int or per_node < 1):
            self.fault(("cluster", "gpus_per_node"), per_node, "a whole number from 1 is needed")
        presumed = self.table(table, ("accelerator",)).get("presumed", [])
        if not isinstance(presumed, list):
            self.fault(("accelerator", "presumed"), presumed, "an array is needed")
            presumed = []
        found: dict[str, Any] = {name: self.section(table, name) for name in _SECTIONS if name in table}
        return Measured(
            path=self.path,
            about={key: value for key, value in about.items() if isinstance(value, str | int | float)},
            gpus_per_node=per_node,
            presumed=tuple(map(str, presumed)),
            **found,
        )

    def section(self, table: dict[str, Any], name: str) -> Any:
        match name:
            case "products":
                return self.by_format(table, name, partial(self.record, kind=Products))
            case "attention":
                return self.by_format(table, name, partial(self.record, kind=Attention))
            case "passes":
                return self.record(self.table(table, (name,)), (name,), Passes)
            case "operations":
                return self.by_format(table, name, self.operations)
            case "launch":
                return self.launch(self.table(table, (name,)))
            case "wires":
                return tuple(self.wires(table[name]))
            case "accelerator":
                return self.accelerator(self.table(table, (name,)))
        return self.values(self.table(table, (name,)))

    def table(self, table: dict[str, Any], key: Key) -> dict[str, Any]:
        found = table.get(key[-1], {})
        if isinstance(found, dict):
            return found
        self.fault(key, found, "a table is needed")
        return {}

    def number(self, table: dict[str, Any], key: Key) -> float:
        value = table.get(key[-1])
        low = 0.0 if key[-1] in FROM_ZERO else 5e-324
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < low:
            least = "from 0" if low == 0.0 else "above 0"
            self.fault(key, "not given" if value is None else value, f"a number {least} is needed")
            return 1.0
        return float(value)

    def points(self, table: dict[str, Any], key: Key, name: str = "points") -> Points:
        value, width = table.get(name, []), POINT[key[0]]
        whole = isinstance(value, list) and all(
            isinstance(row, list) and len(row) == width and all(type(x) in (int, float) and x > 0 for x in row)
            for row in value
        )
        if not whole:
            self.fault((*key, name), value, f"an array of arrays of {width} numbers above 0 is needed")
            return ()
        return tuple(sorted(tuple(float(x) for x in row) for row in value))

    def record(self, table: dict[str, Any], key: Key, kind: Callable[..., T]) -> T:
        """A dataclass of numbers and of points."""
        names = [f.name for f in fields(kind) if f.name != "points"]  # type: ignore[arg-type]
        numbers = {name: self.number(table, (*key, name)) for name in names}
        return kind(**numbers, points=self.points(table, key))

    def by_format(self, table: dict[str, Any], name: str, read: Callable[[dict[str, Any], Key], T]) -> dict[str, T]:
        found = {}
        for number_format, inner in self.table(table, (name,)).items():
            key = (name, number_format)
            if number_format not in NUMBER_FORMATS:
                self.fault(key, inner, "is no number format of the planner", NUMBER_FORMATS)
            elif not isinstance(inner, dict):
                self.fault(key, inner, "a table is needed")
            else:
                found[number_format] = read(inner, key)
        return found

    def operations(self, table: dict[str, Any], key: Key) -> dict[str, Operation]:
        found = {}
        for name in table:
            whole = (*key, name)
            if name not in OPERATIONS:
                self.fault(whole, table[name], "is no operation of the engine", OPERATIONS)
                continue
            inner = self.table(table, whole)
            if inner is not table[name]:
                continue
            both = [self.points(inner, whole, direction) for direction in ("forward", "backward")]
            for direction, points in zip(("forward", "backward"), both, strict=True):
                if not points and not inner.get(direction):
                    self.fault((*whole, direction), inner.get(direction, "not given"), "at least one point is needed")
            if all(both):
                found[name] = Operation(*both)
        return found

    def launch(self, table: dict[str, Any]) -> Launch:
        blocking = table.get("blocking", False)
        if type(blocking) is not bool:
            self.fault(("launch", "blocking"), blocking, "true or false is needed")
        return Launch(self.number(table, ("launch", "seconds")), blocking)

    def wires(self, given: object) -> Iterator[Wire]:
        if not isinstance(given, list) or not all(isinstance(inner, dict) for inner in given):
            self.fault(("wires",), given, "an array of tables is needed")
            return
        for place, table in enumerate(given):
            key = ("wires", str(place))
            sound = True
            for name, legal in (("kind", tuple(KINDS)), ("tier", tuple(TIERS))):
                if table.get(name) not in legal:
                    self.fault((*key, name), table.get(name, "not given"), "no such choice", legal)
                    sound = False
            for name, least in (("ranks", 2), ("inside", 1)):
                value = table.get(name)
                if type(value) is not int or value < least:
                    shown = "not given" if value is None else value
                    self.fault((*key, name), shown, f"a whole number from {least} is needed")
                    sound = False
            numbers = {name: self.number(table, (*key, name)) for name in ("hop_s", "link_Bps", "error")}
            points = self.points(table, key)
            if sound:
                tier = TIERS[table["tier"]]
                yield Wire(table["kind"], tier, table["ranks"], table["inside"], **numbers, points=points)

    def accelerator(self, table: dict[str, Any]) -> Gpu:
        names = ("hbm_bytes", "hbm_Bps", "nvlink_Bps", "nic_Bps", "power_w", "sms", "nvlink_domain")
        numbers = {name: self.number(table, ("accelerator", name)) for name in names}
        peaks = self.table(table, ("accelerator", "peak_flops"))
        key = ("accelerator", "peak_flops")
        for name in peaks.keys() - {*NUMBER_FORMATS}:
            self.fault((*key, name), peaks[name], "is no number format of the planner", NUMBER_FORMATS)
        if not peaks:
            self.fault(key, "not given", "a table of FLOP/s by number format is needed", NUMBER_FORMATS)
        sustained = self.table(table, ("accelerator", "sustained"))
        return Gpu(
            name=str(table.get("name", "measured")),
            generation=str(table.get("generation", "measured")),
            hbm_bytes=int(numbers["hbm_bytes"]),
            hbm_Bps=numbers["hbm_Bps"],
            peak_flops={name: self.number(peaks, (*key, name)) for name in peaks},
            sustained={name: self.number(sustained, ("accelerator", "sustained", name)) for name in sustained},
            nvlink_Bps=numbers["nvlink_Bps"],
            nvlink_domain=int(numbers["nvlink_domain"]),
            nic_Bps=numbers["nic_Bps"],
            power_w=numbers["power_w"],
            sms=max(1, int(numbers["sms"])),
            source=str(table.get("source", "measured")),
        )

    def values(self, table: dict[str, Any]) -> dict[str, float]:
        found = {}
        for name, value in table.items():
            if name not in constants():
                self.fault(("values", name), value, "the planner has no constant of this name")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
                self.fault(("values", name), value, "a number from 0 is needed")
            else:
                found[name] = float(value)
        return found


_SECTIONS = ("accelerator", "products", "attention", "passes", "operations", "launch", "wires", "values")
