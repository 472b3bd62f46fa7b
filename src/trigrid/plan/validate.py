"""Plans of published measurements against what was measured."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from math import log
from pathlib import Path
from statistics import fmean, median

from trigrid.errors import Problem, Refused
from trigrid.plan.constants import shipped
from trigrid.plan.facts import Unplannable
from trigrid.plan.machine import make_machine
from trigrid.plan.rows import Case, read_case, source_of
from trigrid.plan.setup import Setup
from trigrid.plan.step import Step

# An open knob that moves the plan by less than this does not matter.
MATTERS = 0.04
NEEDED = ("id", "hidden", "layers", "heads", "seq", "gpu", "gpus", "tp", "pp", "gbs")


@dataclass(frozen=True)
class RowResult:
    """What became of one row. used: scored, for time or for memory; skipped_because: why it is not.

    A row that leaves something open that matters is planned all the same, but counts in no figure.
    """

    id: str
    source: str
    model: str
    family: str
    time_used: bool
    memory_used: bool
    skipped_because: str
    predicted_step_s: float | None
    measured_step_s: float | None
    predicted_memory_bytes: float | None
    measured_memory_bytes: float | None
    meter: str
    assumptions: tuple[str, ...]
    parts_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def used(self) -> bool:
        return self.time_used or self.memory_used

    @property
    def time_error(self) -> float | None:
        return _error(self.predicted_step_s, self.measured_step_s)

    @property
    def memory_error(self) -> float | None:
        return _error(self.predicted_memory_bytes, self.measured_memory_bytes)


@dataclass(frozen=True)
class Summary:
    """Errors of a group of rows: kind "time", or "memory" by meter; group: a source or a family."""

    kind: str
    group: str
    rows: int
    median: float
    mean: float
    p90: float
    bias: float
    within_10: float


@dataclass(frozen=True)
class Report:
    rows: tuple[RowResult, ...]
    summary: tuple[Summary, ...]


def evidence() -> list[dict[str, str]]:
    """The measurements that ship with the package, with their sources."""
    text = (files("trigrid.plan") / "evidence" / "measured.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV with the columns of the evidence. Raises Refused for what is none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [{k: v or "" for k, v in row.items() if isinstance(k, str)} for row in reader]
            columns = reader.fieldnames or []
    except OSError as error:
        raise Refused([Problem("rows", str(path), f"cannot be read: {error.strerror}")]) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise Refused([Problem("rows", str(path), f"not a CSV file: {error}")]) from error
    if missing := [name for name in NEEDED if name not in columns]:
        lacks = "lacks" if columns else "is empty: it lacks"
        raise Refused([Problem("rows", str(path), f"{lacks} the columns {', '.join(missing)}")])
    if not rows:
        raise Refused([Problem("rows", str(path), "has no rows")])
    return rows


class Planner:
    """Plans cases under given constants; remembers what it has priced."""

    def __init__(self, values: Mapping[str, float] | None = None):
        self.values = values or shipped()
        self._steps: dict[tuple[object, ...], Step] = {}

    def step(self, case: Case, nic: float | None = None) -> Step:
        rate = nic or case.nic_Bps or case.gpu.nic_Bps
        key = (case.spec, case.gpu.name, case.gpus_per_node, rate, case.software, case.format, case.fabric)
        found = self._steps.get(key)
        if found is None:
            machine = make_machine(
                case.gpu, gpus_per_node=case.gpus_per_node, nic_Bps=rate, values=self.values, fabric=case.fabric
            )
            found = self._steps[key] = Step(case.spec, machine, case.software, case.format)
        return found

    def seconds(self, case: Case, setup: Setup | None = None, *, play: bool = False, nic: float | None = None) -> float:
        return self.step(case, nic).time(setup or case.setup, play=play).step_s

    def memory_bytes(self, case: Case, setup: Setup | None = None) -> float:
        """The peak as the row's meter shows it, of its rank or of the fullest."""
        setup = setup or case.setup
        memory = self.step(case).memory
        ranks = range(setup.pp) if case.rank is None else (case.rank,)
        peak = 0.0
        for rank in ranks:
            use = memory.use(setup, rank)
            if case.meter == "allocated":
                peak = max(peak, memory.allocated_bytes(use))
            elif case.meter == "reserved":
                peak = max(peak, memory.reserved_bytes(setup, use))
            else:
                peak = max(peak, memory.device_bytes(setup, use))
        return peak


def validate(rows: Iterable[Mapping[str, str]], values: Mapping[str, float] | None = None) -> Report:
    """Plan every row as stated and compare. values: constants in place of the shipped ones."""
    planner = Planner(values)
    results = tuple(judge(row, planner) for row in rows)
    return Report(results, summarise(results))


def judge(row: Mapping[str, str], planner: Planner) -> RowResult:
    """One row, planned and compared."""
    try:
        case = read_case(row)
    except Unplannable as reason:
        return _skipped(row, str(reason))
    timed = planner.step(case).time(case.setup, play=True)
    why = list(case.open)
    time_why, memory_why = list(why), list(why)
    if case.measured_step_s is None:
        time_why.append("no step time")
    elif case.time_doubt:
        time_why.append(case.time_doubt)
    elif not case.benchmark:
        time_why.append("the time is of a functional test")
    else:
        time_why += _open_for_time(case, planner)
    if case.measured_memory_bytes is None:
        memory_why.append("no memory")
    elif case.memory_doubt:
        memory_why.append(case.memory_doubt)
    else:
        memory_why += _open_for_memory(case, planner)
    time_used, memory_used = not time_why, not memory_why
    reasons = dict.fromkeys([] if time_used or memory_used else [*why, *time_why, *memory_why])
    return RowResult(
        id=case.id,
        source=case.source,
        model=case.model,
        family=case.family,
        time_used=time_used,
        memory_used=memory_used,
        skipped_because="; ".join(reasons),
        predicted_step_s=timed.step_s,
        measured_step_s=case.measured_step_s,
        predicted_memory_bytes=planner.memory_bytes(case),
        measured_memory_bytes=case.measured_memory_bytes,
        meter=case.meter,
        assumptions=case.assumptions,
        parts_s=timed.parts_s,
    )


def _open_for_time(case: Case, planner: Planner) -> list[str]:
    """What the row leaves open that would move its time."""
    base = planner.seconds(case)
    found = []
    for other in case.alternatives:
        if abs(planner.seconds(case, other) / base - 1) > MATTERS:
            changed = [n for n, a, b in zip(Setup._fields, case.setup, other, strict=True) if a != b]
            found.append(f"{_named(changed[0])} is open")
    if case.nic_Bps is None:
        other_nics = (case.gpu.nic_Bps / 2, case.gpu.nic_Bps * 2)
        if any(abs(planner.seconds(case, nic=nic) / base - 1) > MATTERS for nic in other_nics):
            found.append("the NIC's rate is open")
    return list(dict.fromkeys(found))


def _open_for_memory(case: Case, planner: Planner) -> list[str]:
    if case.meter == "unstated":
        return ["what the memory figure counts is not stated"]
    base, found = planner.memory_bytes(case), []
    for other in case.alternatives:
        if abs(planner.memory_bytes(case, other) / base - 1) > MATTERS:
            changed = [n for n, a, b in zip(Setup._fields, case.setup, other, strict=True) if a != b]
            found.append(f"{_named(changed[0])} is open")
    return list(dict.fromkeys(found))


def _named(name: str) -> str:
    return {"zero": "ZeRO", "micro_batch": "the micro-batch", "virtual": "virtual stages"}.get(name, name)


def _skipped(row: Mapping[str, str], reason: str) -> RowResult:
    def number(key: str) -> float | None:
        try:
            return float(row.get(key) or "nan") if row.get(key) else None
        except ValueError:
            return None

    memory = number("peak_mem_gib")
    return RowResult(
        id=row.get("id", ""),
        source=source_of(row.get("id", "")),
        model=row.get("model_name", ""),
        family="",
        time_used=False,
        memory_used=False,
        skipped_because=reason,
        predicted_step_s=None,
        measured_step_s=number("step_time_s"),
        predicted_memory_bytes=None,
        measured_memory_bytes=None if memory is None else memory * 2**30,
        meter="",
        assumptions=(),
    )


def summarise(results: Sequence[RowResult]) -> tuple[Summary, ...]:
    """By family and by source, for time; by meter and by source, for memory."""
    timed = [r for r in results if r.time_used]
    weighed = [r for r in results if r.memory_used]
    found = [_summary("time", "all", [r.time_error for r in timed])]
    for family in sorted({r.family for r in timed}):
        found.append(_summary("time", family, [r.time_error for r in timed if r.family == family]))
    for source in sorted({r.source for r in timed}):
        found.append(_summary("time", source, [r.time_error for r in timed if r.source == source]))
    for meter in sorted({r.meter for r in weighed}):
        found.append(_summary(f"memory ({meter})", "all", [r.memory_error for r in weighed if r.meter == meter]))
    for source in sorted({r.source for r in weighed}):
        found.append(_summary("memory", source, [r.memory_error for r in weighed if r.source == source]))
    return tuple(summary for summary in found if summary.rows)


def _summary(kind: str, group: str, errors: Sequence[float | None]) -> Summary:
    signed = [e for e in errors if e is not None]
    sizes = sorted(map(abs, signed))
    if not sizes:
        return Summary(kind, group, 0, 0, 0, 0, 0, 0)
    p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    within = sum(size <= 0.1 for size in sizes) / len(sizes)
    return Summary(kind, group, len(sizes), median(sizes), fmean(sizes), p90, fmean(signed), within)


def _error(predicted: float | None, measured: float | None) -> float | None:
    if not predicted or not measured:
        return None
    return predicted / measured - 1


def log_error(predicted: float, measured: float) -> float:
    """What a fit makes small: alike for half and for twice."""
    return log(predicted / measured)
