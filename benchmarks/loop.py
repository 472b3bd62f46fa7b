"""The closed loop: calibrate this machine, plan jobs with that, run them, compare.

    python benchmarks/loop.py [SECONDS TO CALIBRATE] [ROUNDS] [--json FILE]
    python benchmarks/loop.py --memory [--only "z3 zbv"] [--part 1/4] [--keep FILE] [--json FILE]

The second form is about memory and communication, see `loop_memory`; it does not depend on what else runs, and with
--keep goes on where it was stopped. The first is about time. Two processes with one thread each, each on a core of its
own; nothing else should run. Jobs take turns in every round, a job's time is the median of its rounds, and `noise` how
far half of them are from that. Machines that are lent are not always as fast: the same few products and activations are
timed throughout the calibration and before and after every step, and a step counts as long as it would take at the
calibration's speed, as the mean of its ranks; `raw` is what the clock said, of its slowest rank. The last line: median
error of the planned step, rank correlation (Spearman), and whether the job that the planner would pick is within the
noise of the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count, product
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from loop_memory import memory_json, memory_text, run_memory

from trigrid.check.calibrate import Order, calibrate_rank
from trigrid.check.calibrate_text import calibration_text
from trigrid.check.parity import batch, share
from trigrid.check.pool import Pool
from trigrid.engine.comm import Comm
from trigrid.grid import grid_of
from trigrid.job import job_from_text
from trigrid.models.build import build_engine
from trigrid.plan.measured import Measured
from trigrid.plan.measured_text import measured_text
from trigrid.plan.plan import make_plan
from trigrid.report.console import Console, table
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout

BASE = """\
[model]
name = "loop"
hidden = 256
layers = 4
heads = 4
kv_heads = 4
head_dim = 64
ffn = 768
vocab = 2048
context = 256
[batch]
sequence = 256
global_batch = 16
[parallel]
sequence_parallel = false
dp = 2
[cluster]
gpus_per_node = 2
[run]
steps = 1
precision = "fp32"
"""
WORLD, STEPS = 2, 3
PROBE = torch.randn(256, 256), torch.randn(768, 256), torch.randn(1024, 256)
# What varies besides the axis: sequences of a microbatch, recomputation, and of each axis its own.
MICRO_BATCHES, RECOMPUTE = (1, 4), ("none", "full")
OWN: dict[str, tuple[dict[str, object], ...]] = {
    "tp": ({},),
    "pp": ({"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "interleaved", "virtual_stages": 2}),
    "dp": ({"zero": 0}, {"zero": 1}, {"zero": 3}),
}


def jobs() -> dict[str, Job]:
    """By what tells them apart."""
    base, found = job_from_text(BASE), {}
    for axis, own in OWN.items():
        for options, micro_batch, recompute in product(own, MICRO_BATCHES, RECOMPUTE):
            layout = Layout(**{"sequence_parallel": False, axis: 2, "recompute": recompute, **options})  # type: ignore[arg-type]
            name = " ".join([f"{axis}2", *map(str, options.values()), f"micro-batch {micro_batch}", recompute])
            found[name] = replace(base, parallel=layout, batch=replace(base.batch, micro_batch=micro_batch))
    return found


@dataclass(frozen=True)
class Timed:
    """A job's planned step and what it took in each round, by the clock and at the speed of the calibration."""

    name: str
    planned_s: float
    raw_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    @property
    def typical_s(self) -> float:
        return median(self.measured_s)

    @property
    def off(self) -> float:
        return self.planned_s / self.typical_s - 1

    @property
    def noise(self) -> float:
        return median(abs(s / self.typical_s - 1) for s in self.measured_s)


def probe_s() -> float:
    """Seconds of a little work that is always the same."""
    x, w, y = PROBE
    begun = time.perf_counter()
    for _ in range(10):
        F.silu(y)
        F.linear(x, w)
    return time.perf_counter() - begun


def calibrated(rank: int, order: Order) -> tuple[Measured, float]:
    """The calibration, and the machine's speed meanwhile: `probe_s`."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(os.getppid()))[rank]})
    probes, points = [probe_s()], count()

    def probe(*_: object) -> None:
        # Not at every point: it takes time of the calibration's own.
        if next(points) % 8 == 0:
            probes.append(probe_s())

    return calibrate_rank(order, rank, WORLD, WORLD, torch.device("cpu"), probe), median(probes)


def step_s(rank: int, job: Job) -> tuple[float, float]:
    """Seconds of a step, the median of a few after one that warms up, and in units of `probe_s`."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    tokens, labels = (share(rows, job, comm.coord.dp) for rows in batch(job, 0))
    spent, probes = [], [probe_s()]
    for _ in range(STEPS + 1):
        comm.all_reduce(torch.zeros(1), "world")
        begun = time.perf_counter()
        engine.accumulate(tokens, labels, None, 0)
        engine.update(engine.sum_gradients(), job.optimizer.lr)
        spent.append(time.perf_counter() - begun)
        probes.append(probe_s())
    units = [2 * one / (before + after) for one, before, after in zip(spent, probes[:-1], probes[1:], strict=True)]
    return median(spent[1:]), median(units[1:])


def ranks_of(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def correlation(one: list[float], other: list[float]) -> float:
    """Spearman's: 1 − 6 Σ d² ÷ (n · (n² − 1))."""
    n = len(one)
    apart = sum((a - b) ** 2 for a, b in zip(ranks_of(one), ranks_of(other), strict=True))
    return 1 - 6 * apart / (n * (n * n - 1))


def run_time(seconds: float, rounds: int, say: Callable[[str], None]) -> tuple[Measured, list[Timed]]:
    """What was measured of the machine, and each job's times."""
    todo = jobs()
    by_axis = (Layout(tp=2), Layout(pp=2), Layout(dp=2))
    raw: dict[str, list[float]] = {name: [] for name in todo}
    measured: dict[str, list[float]] = {name: [] for name in todo}
    with Pool(WORLD) as pool, TemporaryDirectory() as folder:
        # Products of both microbatches' shapes, attention of the smaller one.
        order = Order(seconds, ("fp32",), job=next(iter(todo.values())), layouts=by_axis, command="benchmarks/loop.py")
        say(f"calibrating for {seconds:.0f} s")
        calibrations = pool.run(calibrated, WORLD, order)
        calibration, speed_s = calibrations[0][0], fmean(probe for _, probe in calibrations)
        path = Path(folder, "cluster.toml")
        path.write_text(measured_text(calibration), encoding="utf-8")
        planned = {}
        for name, job in todo.items():
            own = replace(job, cluster=replace(job.cluster, calibration=str(path)))
            planned[name] = make_plan(own).step_s.best
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}: {len(todo)} jobs")
            for name, job in todo.items():
                spent, units = zip(*pool.run(step_s, WORLD, job), strict=True)
                raw[name].append(max(spent))
                measured[name].append(fmean(units) * speed_s)
    return calibration, [Timed(name, planned[name], tuple(raw[name]), tuple(measured[name])) for name in todo]


def time_text(rows: list[Timed]) -> str:
    lines = [
        [
            row.name,
            f"{row.planned_s * 1e3:.1f}",
            f"{row.typical_s * 1e3:.1f}",
            f"{median(row.raw_s) * 1e3:.1f}",
            f"{row.off:+.0%}",
            f"{row.noise:.0%}",
        ]
        for row in sorted(rows, key=lambda row: row.typical_s)
    ]
    found = verdict(rows)
    header = ["job", "planned ms", "measured ms", "raw ms", "off", "noise"]
    return (
        f"{table(header, lines)}\n\n{len(rows)} jobs: median error "
        f"{found['median_error']:.0%}, rank correlation {found['rank_correlation']:.2f}; the pick, {found['pick']}, is "
        f"{found['pick_slower']:.0%} slower than the fastest, {found['fastest']}, which is "
        f"{'within' if found['pick_within_noise'] else 'beyond'} the noise"
    )


def verdict(rows: list[Timed]) -> dict[str, Any]:
    pick, best = min(rows, key=lambda row: row.planned_s), min(rows, key=lambda row: row.typical_s)
    return {
        "median_error": median(abs(row.off) for row in rows),
        "rank_correlation": correlation([row.planned_s for row in rows], [row.typical_s for row in rows]),
        "pick": pick.name,
        "fastest": best.name,
        "pick_slower": pick.typical_s / best.typical_s - 1,
        "pick_within_noise": pick.typical_s <= best.typical_s * (1 + pick.noise + best.noise),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=60.0, help="for calibration")
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="memory and communication on eight processes")
    parser.add_argument("--only", default="", help="with --memory: jobs whose name has all of these words")
    parser.add_argument("--part", default="1/1", help="with --memory: of them the K-th of every N, as K/N")
    parser.add_argument("--keep", type=Path, help="with --memory: rows go there as they come, and are not run again")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args()
    say = Console().say
    if given.memory:
        first, of = map(int, given.part.split("/"))
        memory = run_memory(given.only, (first, of), given.keep, say)
        print(memory_text(memory))
        found: object = memory_json(memory)
    else:
        calibration, rows = run_time(given.seconds, given.rounds, say)
        print(f"{calibration_text(calibration)}\n\n{time_text(rows)}")
        found = {**verdict(rows), "jobs": [asdict(row) for row in rows]}
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
