"""What ranks say of themselves when nothing goes on any more, and who is the cause of it."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trigrid.engine.activity import Waiting
from trigrid.report.console import some
from trigrid.report.failures import STALLS
from trigrid.train.failure import replace

LINES = 16
"""Of ranks that do different things; more are counted."""
RANGES = 8
"""Of the numbers of ranks in one line."""


@dataclass(frozen=True)
class Report:
    """One rank: what it does, for whom it waits (nobody: None), for how long nothing has changed, where its thread that
    trains is now (the innermost call last), at which Unix time; cut_off: it does not reach the first rank's node."""

    rank: int
    phase: str
    action: str | None
    waiting: Waiting | None
    stuck_s: float
    stack: tuple[str, ...]
    when_s: float
    cut_off: bool = False

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


def reaches(address: str, port: int, within_s: float) -> bool:
    """Whether anything answers there."""
    try:
        socket.create_connection((address, port), within_s).close()
    except OSError:
        return False
    return True


def cut_off(reports: Mapping[int, Report], hosts: Sequence[str]) -> list[str]:
    """Nodes that the network does not reach, by what those that still can say: where most do not reach the first
    rank's, it is that one. hosts: by rank."""
    lost = {hosts[rank] for rank, report in reports.items() if report.cut_off}
    there = {hosts[rank] for rank in reports} - lost
    named = there if len(lost) > len(there) else lost
    return [host for host in dict.fromkeys(hosts) if host in named]


def verdict(reports: Mapping[int, Report], world: int, hosts: Sequence[str] = ()) -> str:
    """Who is the cause: nodes that are cut off, ranks that said nothing, and those that wait for nobody; then what
    every rank does. As many lines for 16,384 ranks as for 16. hosts: by rank, where there are several."""
    absent = missing(reports, world)
    busy = [report for report in reports.values() if report.waiting is None]
    lines = []
    if lost := cut_off(reports, hosts) if hosts else []:
        ranks = [rank for rank in range(world) if hosts[rank] in lost]
        nodes = "node is" if len(lost) == 1 else "nodes are"
        lines.append(
            f"cut off: {some(lost)}, {ranks_text(ranks)}: the {nodes} not reached over the network by the others; look "
            "at its NIC, cable and switch port"
        )
    if absent:
        they, are = ("it", "it is") if len(absent) == 1 else ("them", "they are")
        where = f" ({some(list(dict.fromkeys(hosts[rank] for rank in absent)))})" if hosts else ""
        lines.append(f"missing: {ranks_text(absent)}{where}: no word from {they}, so {are} stopped, dead or cut off")
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
