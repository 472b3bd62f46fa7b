"""The closed loop: calibrate this machine, plan jobs with that, run them, compare.

    python benchmarks/loop.py [SECONDS TO CALIBRATE] [ROUNDS]

Two processes with one thread each, each on a core of its own; nothing else should run. Jobs take turns in every round,
a step's time is that of its slowest rank, a job's the median of its rounds. `noise` is how far half of its rounds are
from that. The last line: median error of the planned step, rank correlation (Spearman), and whether the job that the
planner would pick is within the noise of the fastest.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

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


def calibrated(rank: int, order: Order) -> Measured:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(os.getppid()))[rank]})
    return calibrate_rank(order, rank, WORLD, WORLD, torch.device("cpu"), lambda *_: None)


def step_s(rank: int, job: Job) -> float:
    """Seconds of a step: the median of a few after one that warms up."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    tokens, labels = (share(rows, job, comm.coord.dp) for rows in batch(job, 0))
    spent = []
    for _ in range(STEPS + 1):
        comm.all_reduce(torch.zeros(1), "world")
        begun = time.perf_counter()
        engine.accumulate(tokens, labels, None, 0)
        engine.update(engine.sum_gradients(), job.optimizer.lr)
        spent.append(time.perf_counter() - begun)
    return median(spent[1:])


def ranks_of(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def correlation(one: list[float], other: list[float]) -> float:
    """Spearman's: 1 − 6 Σ d² ÷ (n · (n² − 1))."""
    n = len(one)
    apart = sum((a - b) ** 2 for a, b in zip(ranks_of(one), ranks_of(other), strict=True))
    return 1 - 6 * apart / (n * (n * n - 1))


def main() -> None:
    seconds, rounds = (float(word) for word in [*sys.argv[1:], *("60", "5")[len(sys.argv) - 1 :]])
    todo = jobs()
    by_axis = (Layout(tp=2), Layout(pp=2), Layout(dp=2))
    measured: dict[str, list[float]] = {name: [] for name in todo}
    with Pool(WORLD) as pool, TemporaryDirectory() as folder:
        # Products of both microbatches' shapes, attention of the smaller one.
        order = Order(seconds, ("fp32",), job=next(iter(todo.values())), layouts=by_axis, command="benchmarks/loop.py")
        calibration = pool.run(calibrated, WORLD, order)[0]
        path = Path(folder, "cluster.toml")
        path.write_text(measured_text(calibration), encoding="utf-8")
        print(calibration_text(calibration), flush=True)
        planned = {}
        for name, job in todo.items():
            own = replace(job, cluster=replace(job.cluster, calibration=str(path)))
            planned[name] = make_plan(own).step_s.best
        for _ in range(int(rounds)):
            for name, job in todo.items():
                measured[name].append(max(pool.run(step_s, WORLD, job)))
    typical = {name: median(times) for name, times in measured.items()}
    noise = {name: median(abs(s / typical[name] - 1) for s in times) for name, times in measured.items()}
    width = max(map(len, todo))
    print(f"\n{'':{width}}  planned ms  measured ms   off  noise")
    for name in sorted(todo, key=typical.__getitem__):
        plan, real = planned[name] * 1e3, typical[name] * 1e3
        print(f"{name:{width}}  {plan:10.1f}  {real:11.1f}  {plan / real - 1:+4.0%}  {noise[name]:5.0%}")
    error = median(abs(planned[name] / typical[name] - 1) for name in todo)
    pick, best = min(todo, key=planned.__getitem__), min(todo, key=typical.__getitem__)
    near = typical[pick] <= typical[best] * (1 + noise[pick] + noise[best])
    rho = correlation(list(planned.values()), list(typical.values()))
    verdict = (
        "within the noise of the fastest" if near else f"{typical[pick] / typical[best] - 1:.0%} slower than {best}"
    )
    print(f"\n{len(todo)} jobs: median error {error:.0%}, rank correlation {rho:.2f}; the pick, {pick}, is {verdict}")


if __name__ == "__main__":
    main()
