"""What ranks say of themselves when nothing goes on any more, and who is the cause of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trigrid.engine.activity import Waiting
from trigrid.train.failure import STALLS, replace

LINES = 16
"""Of ranks that do different things; more are counted."""
RANGES = 8
"""Of the numbers of ranks in one line."""


@dataclass(frozen=True)
class Report:
    """One rank: what it does, for whom it waits (nobody: None), for how long nothing has changed, where its thread that
    trains is now (the innermost call last), at which Unix time."""

    rank: int
    phase: str
    action: str | None
    waiting: Waiting | None
    stuck_s: float
    stack: tuple[str, ...]
    when_s: float

    def path(self, run_dir: Path) -> Path:
        return run_dir / STALLS / f"rank-{self.rank}.json"

    def save(self, run_dir: Path) -> None:
        replace(self.path(run_dir), json.dumps(asdict(self), indent=1))


def read_reports(run_dir: Path, world: int, since_s: float) -> dict[int, Report]:
    """Reports of the ranks of this world that were written after that Unix time: others are of another attempt."""
    reports = {}
    for path in (run_dir / STALLS).glob("rank-*.json"):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # Taken back just now by a rank that goes on.
            continue
        if waiting := values["waiting"]:
            kind, axis, ranks = waiting
            values["waiting"] = Waiting(kind, axis, tuple(ranks))
        report = Report(**{**values, "stack": tuple(values["stack"])})
        if report.rank < world and report.when_s > since_s:
            reports[report.rank] = report
    return reports


def missing(reports: Mapping[int, Report], world: int) -> list[int]:
    return [rank for rank in range(world) if rank not in reports]


def verdict(reports: Mapping[int, Report], world: int) -> str:
    """Who is the cause: ranks that said nothing, and those that wait for nobody; then what every rank does. As many
    lines for 16,384 ranks as for 16."""
    absent = missing(reports, world)
    busy = [report for report in reports.values() if report.waiting is None]
    lines = []
    if absent:
        they, are = ("it", "it is") if len(absent) == 1 else ("them", "they are")
        lines.append(f"missing: {ranks_text(absent)}: no word from {they}, so {are} stopped, dead or cut off")
    if busy:
        they, them = ("it", "it") if len(busy) == 1 else ("they", "them")
        lines.append(
            f"hung or slow: {ranks_text([r.rank for r in busy])}: others may wait for {them}, {they} for nobody"
        )
    if not lines:
        lines.append(
            "no rank is missing and each waits for others: they are not in the same collective, or a device is hung, "
            "or the network has lost something"
        )
    lines += [f"  {ranks}: {text}" for text, ranks in actions(reports).items()]
    return "\n".join(lines)


def actions(reports: Mapping[int, Report]) -> dict[str, str]:
    """What is done → by which ranks; those that wait for nobody first. Peers are named, and nobody left out, as long as
    there are few different answers."""
    ordered = sorted(reports.values(), key=lambda report: (report.waiting is not None, report.rank))
    grouped = _grouped(ordered, True)
    if len(grouped) > LINES:
        grouped = _grouped(ordered, False)
    found = {}
    for text, group in list(grouped.items())[:LINES]:
        low, high = min(r.stuck_s for r in group), max(r.stuck_s for r in group)
        span = f"{low:.0f} s" if round(low) == round(high) else f"{low:.0f} to {high:.0f} s"
        found[f"{text}, unchanged for {span}"] = ranks_text([r.rank for r in group])
    if rest := [r.rank for group in list(grouped.values())[LINES:] for r in group]:
        found[f"{len(grouped) - LINES} other answers, in {STALLS}/ of the run's folder"] = ranks_text(rest)
    return found


def _grouped(reports: Iterable[Report], peers: bool) -> dict[str, list[Report]]:
    grouped: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        grouped[_words(report, peers)].append(report)
    return grouped


def _words(report: Report, peers: bool) -> str:
    doing = f"{report.phase}, {report.action}" if report.action else report.phase
    if report.waiting is None:
        return f"{doing}, busy at {report.stack[-1]}" if report.stack else f"{doing}, busy"
    kind, axis, ranks = report.waiting
    if axis:
        return f"{doing}, waits for {kind} over {axis}" + (f" of {ranks_text(ranks)}" if peers else "")
    return f"{doing}, waits to {kind} " + (ranks_text(ranks) if peers else "a neighbour")


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-5, 8`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges[:RANGES]]
    more = sum(last - first + 1 for first, last in ranges[RANGES:])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}" + (f" and {more:,} more" if more else "")
