"""What `trigrid doctor` has found: a table for people, and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Literal

from trigrid.report.console import some

Verdict = Literal["sound", "wrong", "told", "not here"]
SCHEMA = "trigrid.doctor/1"
SHOWN = {"sound": "ok", "wrong": "WRONG", "told": "", "not here": "not here"}
STYLES = {"sound": "green", "wrong": "bold red", "told": "", "not here": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at. verdict: "told" is a fact that nobody can judge, "not here" a check that this
    machine has nothing for, which is not the same as a sound one. advice: what to do where it is wrong, or so that it
    can be judged. where: the hosts, all of them where it is empty. value: what was measured, in `unit`; usual: what was
    expected."""

    what: str
    verdict: Verdict
    measured: str = ""
    expected: str = ""
    advice: str = ""
    where: tuple[str, ...] = ()
    value: float | None = None
    usual: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Examination:
    """All findings of `world` ranks on `hosts`, made in `seconds`; sampled: what was left out for want of time."""

    world: int
    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    sampled: tuple[str, ...]
    seconds: float

    @property
    def wrong(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "wrong"]


def merged(findings: Iterable[Finding], hosts: int) -> list[Finding]:
    """Equal findings of several hosts as one; of no host where all of them have it."""
    found: dict[Finding, list[str]] = {}
    for finding in findings:
        found.setdefault(replace(finding, where=()), []).extend(finding.where)
    return [
        replace(finding, where=() if len({*where}) == hosts else tuple(dict.fromkeys(where)))
        for finding, where in found.items()
    ]


def differing(told: Sequence[tuple[str, dict[str, str]]]) -> list[Finding]:
    """What is installed, from (host, name → version): one finding for each name, wrong where hosts differ."""
    found = []
    for name in dict.fromkeys(name for _, versions in told for name in versions):
        hosts: dict[str, list[str]] = {}
        for host, versions in told:
            hosts.setdefault(versions.get(name, "none"), []).append(host)
        if len(hosts) == 1:
            found.append(Finding(what=name, verdict="told", measured=next(iter(hosts))))
            continue
        usual = max(hosts, key=lambda version: len(hosts[version]))
        odd = [host for version, theirs in hosts.items() if version != usual for host in theirs]
        found.append(
            Finding(
                what=name,
                verdict="wrong",
                measured=", ".join(f"{version} on {some(theirs)}" for version, theirs in hosts.items()),
                expected="the same on all nodes",
                advice=f"install {usual} there: ranks of different versions may differ in what they compute and send",
                where=tuple(odd),
            )
        )
    return found


def as_json(found: Examination) -> dict[str, Any]:
    return {"schema": SCHEMA, "sound": not found.wrong, **asdict(found)}


def verdict_text(found: Examination) -> str:
    """What is wrong, in one line."""
    missing = sum(finding.verdict == "not here" for finding in found.findings)
    there = f"; {missing} checks have nothing here to look at" if missing else ""
    if not found.wrong:
        return f"nothing is wrong, as far as was looked{there}"
    return f"{len(found.wrong)} wrong: {', '.join(dict.fromkeys(f.what for f in found.wrong))}{there}"


def print_table(found: Examination, out: IO[str], width: int | None) -> None:
    """The findings, then what to do about those that are not sound. width: of the page, the terminal's where None."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("looked at", "measured", "expected", "verdict", "where"):
        table.add_column(name, overflow="fold")
    several = len(found.hosts) > 1
    for finding in found.findings:
        where = some(finding.where) if several else ""
        shown = Text(SHOWN[finding.verdict], style=STYLES[finding.verdict])
        table.add_row(Text(finding.what), Text(finding.measured), Text(finding.expected), shown, Text(where))
    page = Console(file=out, width=width, soft_wrap=False)
    hosts = f"{len(found.hosts):,} nodes" if several else found.hosts[0]
    page.print(Text(f"{found.world:,} rank{'s' if found.world > 1 else ''} on {hosts}, {found.seconds:.0f} s"))
    page.print(table)
    advised = [finding for finding in found.findings if finding.advice and finding.verdict != "sound"]
    for finding in sorted(advised, key=lambda finding: finding.verdict != "wrong"):
        where = f" ({some(finding.where)})" if finding.where and several else ""
        page.print(Text(f"→ {finding.what}{where}: {finding.advice}"))
    for line in found.sampled:
        page.print(Text(f"  {line}"))
    page.print(Text(verdict_text(found), style="bold"))
