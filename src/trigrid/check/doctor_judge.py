"""What was measured by all ranks, as findings: the slowest is named, and wrong where it is far from what is expected.

Expected is what the planner prices, from the catalogue or a calibration; without either, what a quarter of the like
reach: of few nodes, one that is slow is in half of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trigrid.check.doctor_network import (
    AXES,
    COLLECTIVE_BYTES,
    COLLECTIVES,
    PAIR_BYTES,
    Sent,
    Skew,
    busbw,
    by_rank,
)
from trigrid.grid import Grid
from trigrid.launch.seats import WHERE, Seating, span
from trigrid.plan.measured import WireKind
from trigrid.plan.network import Group, Network
from trigrid.report.doctor import Finding
from trigrid.report.units import figures, rate
from trigrid.spec.cluster import Tier

FAIR = {"cpu": 0.25, "cuda": 0.5}
"""Share of the expected bandwidth below which something is wrong; processes on CPUs share cores, and vary."""
FAIR_PRODUCTS, FAIR_CATALOGUE = {"cpu": 0.25, "cuda": 0.85}, 0.7
"""Share of the median of all ranks, and of what the catalogue says that the GPU sustains."""
SLOWER = 1.5
"""Times as long as messages without a rank its own must take, for it to be named alone."""
MOST_SKEW_S = 0.5
NETWORK = "look at the NIC, cable and switch port of what is named: ibstat, ethtool; NCCL_DEBUG=INFO"
INSIDE = "look at NVLink or PCIe of what is named (nvidia-smi topo -m), and at what else runs there"


@dataclass(frozen=True)
class Taken:
    """What one rank has measured: seconds of collectives by axis, to the next stages, of messages in pairs; its rate of
    products; how many rounds of pairs there was time for."""

    axes: Mapping[tuple[str, WireKind], float]
    neighbours: Mapping[int, float]
    sent: Sequence[Sent]
    rounds: int
    flops_per_s: float


@dataclass(frozen=True)
class Judge:
    """Of ranks on `device` ("cpu", "cuda") that sit as `seating` says. network: prices what is expected, if known;
    flops_per_s: of products, if known."""

    grid: Grid
    seating: Seating
    device: str
    network: Network | None
    flops_per_s: float | None = None

    def judge(self, taken: Sequence[Taken]) -> Iterator[Finding]:
        """taken: by rank."""
        yield self._products([rank.flops_per_s for rank in taken])
        for axis in AXES:
            for kind in COLLECTIVES:
                if (axis, kind) in taken[0].axes:
                    yield self._axis(axis, kind, [rank.axes[axis, kind] for rank in taken])
        for sent, what in (
            ([Sent(i, j, s, False) for i, rank in enumerate(taken) for j, s in rank.neighbours.items()], "pp message"),
            ([message for rank in taken for message in rank.sent if not message.between], "messages inside nodes"),
            ([message for rank in taken for message in rank.sent if message.between], "messages between nodes"),
        ):
            if sent:
                size = (COLLECTIVE_BYTES if what.startswith("pp") else PAIR_BYTES)[self.device]
                yield self._messages(what, sent, size)
            elif what == "messages between nodes":
                yield Finding(what=what, verdict="not here", measured="all ranks are on one node")

    def _products(self, rates: Sequence[float]) -> Finding:
        usual, slow = median(rates), min(range(len(rates)), key=rates.__getitem__)
        least = max(FAIR_PRODUCTS[self.device] * usual, FAIR_CATALOGUE * (self.flops_per_s or 0.0))
        wrong, several = rates[slow] < least, len(rates) > 1
        expected = [f"median {rate(usual)}"] if several else []
        expected += [f"catalogue {rate(self.flops_per_s)}"] if self.flops_per_s else []
        return Finding(
            what="matrix products",
            verdict="wrong" if wrong else "sound" if expected else "told",
            measured=rate(rates[slow]) + (f", slowest {self._who((slow,))}" if several else ""),
            expected=", ".join(expected),
            advice="all ranks wait for it: look at its clocks and cooling, and at what else runs there"
            if wrong
            else "",
            where=self._hosts((slow,)) if wrong else (),
            value=rates[slow],
            usual=self.flops_per_s or usual,
            unit="FLOP/s",
        )

    def _axis(self, axis: str, kind: WireKind, seconds: Sequence[float]) -> Finding:
        size, groups = COLLECTIVE_BYTES[self.device], self.grid.groups(axis)
        rates = {group: busbw(kind, size, len(group), max(seconds[r] for r in group)) for group in groups}
        slow = min(rates, key=rates.__getitem__)
        like = self._like(rates, slow)
        usual = self._planned(kind, size, slow) or _usual(like)
        return self._link(
            f"{axis} {kind} of {len(slow)}, {WHERE[self.seating.tier(slow)]}", rates[slow], usual, slow, len(like) > 1
        )

    def _messages(self, what: str, sent: Sequence[Sent], size: int) -> Finding:
        rates: dict[tuple[int, ...], float] = {(m.low, m.high): size / m.seconds for m in sent}
        slow = min(rates, key=rates.__getitem__)
        like = self._like(rates, slow)
        usual = self._planned("message", size, slow) or _usual(like)
        # A slow NIC is slow towards everybody, a slow cable between two only towards one.
        theirs = {rank: median(times) for rank, times in by_rank(sent)}
        worst = max(slow, key=theirs.__getitem__)
        others = [message.seconds for message in sent if worst not in message[:2]]
        named = (worst,) if others and theirs[worst] > SLOWER * median(others) else slow
        return self._link(what, rates[slow], usual, slow, len(like) > 1, named)

    def _like(self, rates: Mapping[tuple[int, ...], float], slow: tuple[int, ...]) -> list[float]:
        """Of those that cross the same network as `slow`: a link between nodes is not slow beside one inside."""
        tier = self.seating.tier(slow)
        return [rate for ranks, rate in rates.items() if self.seating.tier(ranks) == tier]

    def _link(
        self, what: str, found: float, usual: float, slow: tuple[int, ...], several: bool, named: tuple[int, ...] = ()
    ) -> Finding:
        wrong, near = found < FAIR[self.device] * usual, self.seating.tier(slow) <= Tier.NVLINK
        source = "planned" if self.network else "a quarter reach"
        return Finding(
            what=what,
            verdict="wrong" if wrong else "sound" if several or self.network else "told",
            measured=f"{figures(found / 1e9)} GB/s" + (f", slowest {self._who(slow)}" if several else ""),
            expected=f"{source} {figures(usual / 1e9)} GB/s" if several or self.network else "",
            advice=f"{self._who(named or slow)}: {INSIDE if near else NETWORK}" if wrong else "",
            where=self._hosts(named or slow) if wrong else (),
            value=found,
            usual=usual,
            unit="B/s",
        )

    def _planned(self, kind: WireKind, size: int, ranks: tuple[int, ...]) -> float | None:
        if self.network is None:
            return None
        tier = self.seating.tier(ranks)
        nodes = len(self._hosts(ranks))
        group = Group(len(ranks), len(ranks) // nodes, nodes, tier)
        if kind == "message":
            seconds = self.network.message_s(size, tier)
        else:
            price = {"all_reduce": self.network.reduce_s, "all_gather": self.network.gather_s}
            seconds = price.get(kind, self.network.scatter_s)(size, group)
        return busbw(kind, size, len(ranks), seconds)

    def _hosts(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.seating.seats[rank].host for rank in ranks))

    def _who(self, ranks: Sequence[int]) -> str:
        words = f"rank{'s' if len(ranks) > 1 else ''} {span(ranks)}"
        return f"{words} ({', '.join(self._hosts(ranks)[:3])})" if len(self.seating.hosts) > 1 else words


def _usual(rates: Iterable[float]) -> float:
    ordered = sorted(rates)
    return ordered[-1 - len(ordered) // 4]


def judge_skew(skews: Sequence[Skew]) -> Finding:
    """Of the clocks of all nodes beside the first one's."""
    if not skews:
        return Finding(what="clocks of nodes", verdict="not here", measured="there is one node")
    worst = max(skews, key=lambda skew: abs(skew.offset_s))
    wrong = abs(worst.offset_s) - worst.error_s > MOST_SKEW_S
    return Finding(
        what="clocks of nodes",
        verdict="wrong" if wrong else "sound",
        measured=f"{worst.host} is {worst.offset_s * 1e3:+,.1f} ms off (± {worst.error_s * 1e3:.1f})",
        expected=f"within {MOST_SKEW_S * 1e3:.0f} ms of the first node's",
        advice="start chrony or another NTP client: which rank failed first is told by these clocks",
        where=(worst.host,) if wrong else (),
        value=worst.offset_s,
        usual=0.0,
        unit="s",
    )
