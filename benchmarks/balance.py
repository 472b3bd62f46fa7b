"""Two pipeline ranks, each pinned to a core of its own: a balanced split of uneven stages beside the even one.

    python benchmarks/balance.py

A small Llama whose vocabulary makes the head as dear as some layers. The even split gives the last stage half of the
layers and the head. The balancer gives the split with the fastest slowest stage; its costs are here CPU seconds of each
rank in runs of the even split, since the planner's times are of accelerators. Both train the same job with 1F1B over
gloo, in turn; each round gives a ratio of the times of their steps. It needs a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from trigrid.blueprint import split_layers
from trigrid.job import dump_job, job_from_text
from trigrid.plan.balance import balanced_split
from trigrid.spec.job import Job

RANKS, ROUNDS, WARM_UP, MEASURED = 2, 3, 3, 6
JOB = """\
[model]
name = "uneven"
vocab = 16384
hidden = 256
layers = 8
heads = 4
kv_heads = 4
head_dim = 64
ffn = 704
context = 128

[parallel]
pp = 2
dp = 1
zero = 0

[batch]
sequence = 128
global_batch = 16
micro_batch = 1

[data]
corpus = ["stdlib"]

[run]
steps = 10
precision = "fp32"
device = "cpu"
log_every = 1
trackers = []
"""


def balanced(job: Job) -> tuple[int, ...]:
    """The split whose slowest stage has the least to compute: two runs of the even split, one longer than the other,
    tell what each rank computes in a step; the first has layers and little else, the last the same and the head."""
    used = []
    for steps in (2, 2 + MEASURED):
        with tempfile.TemporaryDirectory() as folder:
            used.append(run(replace(job, run=replace(job.run, steps=steps)), Path(folder))[1])
    first, last = ((longer - shorter) / MEASURED for shorter, longer in zip(*used, strict=True))
    even = split_layers(job.model.layers, RANKS)
    layer = first / even[0]
    head = max(0.0, last - even[1] * layer)
    print(f"a layer takes {layer:.3f} CPU-s a step, the head {head:.3f}", flush=True)
    found = balanced_split(RANKS, job.model.layers, lambda stage, _, count: count * layer + head * (stage == RANKS - 1))
    assert found is not None
    return found


def run(job: Job, folder: Path) -> tuple[float, list[float]]:
    """Seconds of a step, the median after WARM_UP of them, and CPU seconds of each rank, each on a core of its own."""
    path = folder / "job.toml"
    path.write_text(dump_job(replace(job, run=replace(job.run, out=str(folder / "runs")))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    cores = sorted(os.sched_getaffinity(0))
    processes = []
    for rank in range(RANKS):
        # A child begins on the cores of its parent.
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "trigrid", "train", str(path), "--quiet"]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
    os.sched_setaffinity(0, cores)
    used = []
    try:
        for process in processes:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            used.append(usage.ru_utime)
            if process.returncode:
                raise SystemExit("a rank failed; see above")
    finally:
        for process in processes:
            process.kill()
    (metrics,) = (folder / "runs").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = [line["step_s"] for line in lines if line["kind"] == "step"]
    return median(times[WARM_UP:] or times), used


def main() -> None:
    job = job_from_text(JOB)
    even, split = split_layers(job.model.layers, RANKS), balanced(job)
    jobs = [replace(job, parallel=replace(job.parallel, stage_layers=layers)) for layers in (even, split)]
    times: list[list[float]] = [[], []]
    for number in range(ROUNDS + 1):
        for own, contestant in zip(times, jobs, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                took, _ = run(contestant, Path(folder))
            if number:  # The first round warms up.
                own.append(took)
                print(f"stage_layers {list(contestant.parallel.stage_layers)}: {took * 1e3:,.0f} ms", flush=True)
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    for name, layers, own in zip(("even", "balanced"), (even, split), times, strict=True):
        print(f"{name:9} stage_layers {list(layers)}: {median(own) * 1e3:,.0f} ms a step")
    print(f"even ÷ balanced: {median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] over {ROUNDS} rounds in turn")
    if median(ratios) <= 1:
        raise SystemExit("the balanced split is no faster")


if __name__ == "__main__":
    main()
