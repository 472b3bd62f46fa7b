"""Long runs with failures, played: what the closed forms of goodput.py are checked by, and how far runs lie apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gamma, inf
from random import Random

from trigrid.plan.goodput import CAUSES, STALL_S, LongRun
from trigrid.plan.plan import Plan

COPY_Bps = 10e9
"""Of a snapshot from one GPU to host memory; presumed, half of what PCIe 4 carries."""
NODE_WRITE_Bps = 1e9
"""Of one node into shared storage. Llama 3 (Grattafiori 2024, section 3.3.1): 2 TB/s sustained, for 2,048 nodes."""
FEW = 2
"""Whole periods before a failure that are played one by one; those before them are all alike."""


@dataclass(frozen=True)
class Played:
    """One run: seconds by cause, in the order of CAUSES, which are all of its time; failures, those during restarts
    included; snapshots lost while they were written."""

    seconds: Mapping[str, float]
    failures: int
    snapshots_lost: int

    @property
    def productive_share(self) -> float:
        return self.seconds["productive"] / sum(self.seconds.values())


@dataclass(frozen=True)
class Spread:
    """Productive shares of several runs, and what else they had on average."""

    runs: int
    mean: float
    standard_error: float
    p5: float
    p95: float
    shares: Mapping[str, float]
    failures: float


def simulate_run(run: LongRun, days: float, seed: int | str = 0, shape: float = 1.0) -> Played:
    """Play `days` of `run` from the first step on; what is not yet saved at the end counts as kept.

    Times between failures are Weibull of mean run.mtbf_s and this shape: 1 is exponential, less has them in clusters.
    They begin anew with each restart; nothing fails while a failure is not yet detected.
    """
    draw, scale = Random(seed), run.mtbf_s / gamma(1 + 1 / shape)
    seconds = dict.fromkeys(CAUSES, 0.0)
    left, failures, lost = days * 86400.0, 0, 0
    up = True
    while left > 0:
        until = draw.weibullvariate(scale, shape)
        if not up:
            spent = min(run.restart_s, until, left)
            seconds["restart"] += spent
            left -= spent
            up = run.restart_s <= until
            until -= run.restart_s
        if up and left > 0:
            kept, stalled, thrown, torn = _train(run, min(until, left), fails=until < left)
            seconds["productive"] += kept
            seconds["checkpoint"] += stalled
            seconds["lost work"] += thrown
            lost += torn
            left -= min(until, left)
        if left > 0:
            failures += 1
            spent = min(run.detect_s, left)
            seconds["detection"] += spent
            left -= spent
            up = False
    return Played(seconds, failures, lost)


def _train(run: LongRun, duration_s: float, fails: bool) -> tuple[float, float, float, int]:
    """Training for `duration_s`, then a failure or the end: work that is kept, stalls, work that is lost, and snapshots
    that were being written when it failed."""
    many = max(0, int((duration_s - run.write_s) / run.period_s) - FEW)
    now, worked, stalled = many * run.period_s, many * run.interval_s, many * run.stall_s
    # What the newest safe checkpoint holds; when the snapshot under way will be safe, and what it holds.
    safe, safe_at, held = worked, inf, worked
    while now < duration_s:
        for stall, phase_s in ((False, run.interval_s), (True, run.stall_s)):
            spent = min(phase_s, max(0.0, duration_s - now))
            # Safe before the next snapshot begins, since no interval is shorter than a write.
            if safe_at <= now + spent:
                safe, safe_at = held, inf
            now += spent
            if stall:
                stalled += spent
            else:
                worked += spent
        if now < duration_s:
            safe_at, held = now + run.write_s, worked
    if not fails:
        return worked, stalled, 0.0, 0
    return safe, stalled, worked - safe, int(safe_at < inf)


def simulate_runs(
    run: LongRun,
    days: float,
    runs: int,
    seed: int = 0,
    shape: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Spread:
    """As `simulate_run`, `runs` times, each with failures of its own. progress: told of (done, total)."""
    played = []
    for number in range(runs):
        played.append(simulate_run(run, days, f"{seed}/{number}", shape))
        progress(number + 1, runs)
    shares = sorted(one.productive_share for one in played)
    mean = sum(shares) / runs
    variance = sum((share - mean) ** 2 for share in shares) / max(1, runs - 1)
    total = sum(sum(one.seconds.values()) for one in played)
    return Spread(
        runs=runs,
        mean=mean,
        standard_error=(variance / runs) ** 0.5,
        p5=_quantile(shares, 0.05),
        p95=_quantile(shares, 0.95),
        shares={cause: sum(one.seconds[cause] for one in played) / total for cause in CAUSES},
        failures=sum(one.failures for one in played) / runs,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class CheckpointCost:
    """bytes: of all ranks together; nodes that write; stall_s, write_s: as in `LongRun`."""

    bytes: float
    nodes: int
    stall_s: float
    write_s: float


def checkpoint_cost(plan: Plan, node_write_Bps: float = NODE_WRITE_Bps) -> CheckpointCost:
    """What a checkpoint of the planned job costs: masters and both moments of every parameter, once.

    Every rank that holds something no other holds writes it: one copy of those that `dp_replicate`, or with ZeRO-0 dp,
    make. A snapshot stops training for STALL_S and a copy to the host at COPY_Bps; where checkpoints are not written in
    the background, until all is written.
    """
    job, policy, setup = plan.job, plan.software.policy, plan.setup
    size = plan.parameters * ((policy.master or policy.weights) + policy.moments)
    ranks = setup.world // (setup.dp if setup.zero == 0 else setup.dp_replicate)
    nodes = -(-ranks // min(job.cluster.gpus_per_node, ranks))
    stall_s, write_s = STALL_S + size / ranks / COPY_Bps, size / nodes / node_write_Bps
    if job.checkpoint.background:
        return CheckpointCost(size, nodes, stall_s, write_s)
    return CheckpointCost(size, nodes, stall_s + write_s, 0.0)
