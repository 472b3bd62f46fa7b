"""Where the ranks sit: the plan's best rank order beside its worst, over links that are slow enough to decide.

    PYTHONPATH=tests python benchmarks/placement.py [MBIT] [ROUNDS]

As root: four hosts, network namespaces whose links carry MBIT in each direction, with two ranks each; TP2 × PP2 × DP2,
each rank on a core of its own where there are eight, else by turns. The links are measured as `trigrid calibrate` does,
all orders of the axes are planned with that, and the best and the worst of them take turns, a step each. Exit code 1
where the best is not measurably faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from trigrid.check.calibrate import Order, calibrate_rank
from trigrid.check.parity import batch, share
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.grid import grid_of
from trigrid.job import job_from_text
from trigrid.models.build import build_engine
from trigrid.plan.measured_text import measured_text
from trigrid.plan.plan import make_plan
from trigrid.spec.job import Job

HOSTS, PER_HOST, PORT, ADDRESS = 4, 2, 29_600, "10.77.0.1"
CALIBRATE_S = 12.0
JOB = """\
[model]
name = "placement"
hidden = 128
layers = 4
heads = 4
kv_heads = 4
head_dim = 32
ffn = 256
vocab = 512
context = 256
[batch]
sequence = 256
global_batch = 8
[parallel]
tp = 2
pp = 2
dp = 2
sequence_parallel = false
[cluster]
gpus_per_node = 2
[run]
steps = 1
precision = "fp32"
"""


def orders() -> dict[str, Job]:
    """The job in each order of its axes, by that, slowest first."""
    base = job_from_text(JOB)
    axes = [axis for axis in base.parallel.order if base.parallel.degree(axis) > 1]
    idle = tuple(axis for axis in base.parallel.order if axis not in axes)
    found = {}
    for order in permutations(axes):
        layout = replace(base.parallel, order=(*order, *idle))
        found[" ".join(order)] = replace(base, parallel=layout)
    return found


def rank_main(rank: int, rounds: int, folder: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    world = HOSTS * PER_HOST
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS}:{PORT}", rank=rank, world_size=world)
    jobs = orders()
    layouts = tuple(job.parallel for job in jobs.values())
    asked = Order(
        CALIBRATE_S, ("fp32",), job=next(iter(jobs.values())), layouts=layouts, command="benchmarks/placement.py"
    )
    measured = calibrate_rank(asked, rank, world, PER_HOST, torch.device("cpu"), lambda *_: None)
    chosen: list[object] = [None]
    if rank == 0:
        path = folder / "cluster.toml"
        path.write_text(measured_text(measured), encoding="utf-8")
        cluster = replace(next(iter(jobs.values())).cluster, calibration=str(path))
        planned = {name: make_plan(replace(job, cluster=cluster)).step_s.best for name, job in jobs.items()}
        ranked = sorted(planned, key=planned.__getitem__)
        chosen = [(planned, ranked[0], ranked[-1])]
    dist.broadcast_object_list(chosen)
    planned, best, worst = chosen[0]
    engines = {
        name: build_engine(jobs[name], Comm(grid_of(jobs[name]), rank), torch.device("cpu")) for name in (best, worst)
    }
    spent: dict[str, list[float]] = {best: [], worst: []}
    for round_ in range(rounds + 1):
        for name, engine in engines.items():
            seconds = step_s(engine, jobs[name])
            if round_:
                spent[name].append(seconds)
    if rank == 0:
        wires = [(w.kind, w.tier.name, w.link_Bps) for w in measured.wires if w.kind == "message"]
        told = {"planned": planned, "best": best, "worst": worst, "spent": spent, "wires": wires}
        (folder / "answer.json").write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


def step_s(engine: Engine, job: Job) -> float:
    """Seconds of a step, of its slowest rank."""
    tokens, labels = (share(rows, job, engine.comm.coord.dp) for rows in batch(job, 0))
    engine.comm.all_reduce(torch.zeros(1), "world")
    begun = time.perf_counter()
    engine.accumulate(tokens, labels, None, 0)
    engine.update(engine.sum_gradients(), job.optimizer.lr)
    mine = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    return engine.comm.read(engine.comm.all_reduce(mine, "world", "max"))[0]


def quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def report(told: dict[str, object], mbit: float) -> bool:
    """Print what was measured; whether the plan's order is measurably faster."""
    planned, best, worst, spent = told["planned"], told["best"], told["worst"], told["spent"]
    assert isinstance(planned, dict)
    assert isinstance(spent, dict)
    print(f"{HOSTS} hosts of {PER_HOST} ranks, links of {mbit:g} Mbit/s ({mbit / 8e3:.3g} GB/s); messages measured:")
    for kind, tier, rate in told["wires"]:  # type: ignore[attr-defined]
        print(f"  {kind} ({tier.lower()}): {rate / 1e9:.3g} GB/s")
    print("order, slowest axis first    planned ms  measured ms  [quartiles]")
    for name in sorted(planned, key=planned.__getitem__):
        line = f"  {name:26} {planned[name] * 1e3:10.0f}"
        if name in spent:
            low, high = quartiles(spent[name])
            line += f"  {median(spent[name]) * 1e3:11.0f}  [{low * 1e3:.0f}, {high * 1e3:.0f}]"
        print(line)
    ratios = [slow / fast for fast, slow in zip(spent[best], spent[worst], strict=True)]
    low, high = quartiles(ratios)
    there = "faster" if low > 1 else "NOT measurably faster"
    print(
        f"{len(ratios)} rounds in turn: {worst} takes {median(ratios):.2f} × as long as {best} [{low:.2f}, {high:.2f}] "
        f"(planned {planned[worst] / planned[best]:.2f} ×): the plan's order is {there}"
    )
    return low > 1


def main() -> None:
    from helpers.hosts import hosts_of

    mbit, rounds = (float(word) for word in [*sys.argv[1:], *("100", "10")[len(sys.argv) - 1 :]])
    with hosts_of(HOSTS) as hosts, TemporaryDirectory() as folder:
        for host in hosts:
            host.limit(mbit)
        words = (sys.executable, __file__, "rank")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = [
            subprocess.Popen(host.command(*words, str(index * PER_HOST + local), str(int(rounds)), folder), env=env)
            for index, host in enumerate(hosts)
            for local in range(PER_HOST)
        ]
        try:
            codes = [process.wait() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        sys.exit(not report(json.loads(Path(folder, "answer.json").read_text(encoding="utf-8")), mbit))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
