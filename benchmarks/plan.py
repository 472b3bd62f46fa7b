"""Plans and searches, in CPU seconds of one core.

    python benchmarks/plan.py

Search: every legal layout of a model on a cluster; candidates are distinct layouts, most of them left out by a bound.
Plan: one layout with its schedule of 16 ranks and 128 microbatches replayed. Process: `trigrid plan` from start to end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from trigrid.job import job_from_text
from trigrid.plan import plan as plan_module
from trigrid.plan.plan import make_plan
from trigrid.plan.search import search_layouts
from trigrid.spec.job import Job

SEARCHES = (
    ("gpt3-175b", 4_096, 2048, 1536, "a100"),
    ("llama3-8b", 8, 8192, 512, "h100"),
    ("llama3-405b", 16_384, 8192, 2048, "h100"),
    ("megatron-1t", 10_000, 2048, 3072, "h100"),
    ("llama3-70b", 60, 8192, 500, "h100"),
)
ROUNDS = 5
PROCESS = "plan llama3-405b --gpus 1024 --gpu h100 --seq 8192 --global-batch 512 --tp 8 --pp 8 --virtual 4 --zero 1"


def job(model: str, sequence: int, batch: int, gpu: str) -> Job:
    return job_from_text(
        f'[model]\nname = "{model}"\n[cluster]\ngpu = "{gpu}"\n'
        f"[batch]\nsequence = {sequence}\nglobal_batch = {batch}\n[run]\nsteps = 1\n"
    )


def measured(work: Callable[[], object]) -> float:
    """CPU seconds of `work`."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main() -> None:
    print("search: every legal layout, caches empty")
    for model, gpus, sequence, batch, gpu in SEARCHES:
        base = job(model, sequence, batch, gpu)
        plan_module.step_for.cache_clear()
        begun = time.process_time()
        found = search_layouts(base, gpus=gpus)
        spent = time.process_time() - begun
        assert found is not None
        counts = found.counts
        print(
            f"  {model:12} {gpus:>6,} GPUs {spent:6.2f} CPU-s  {counts.legal:>8,} legal  {counts.priced:>6,} priced  "
            f"{counts.replayed:>3} replayed {counts.legal / spent:>9,.0f} legal/CPU-s; {found.chosen.step_s:.2f} s",
            flush=True,
        )
    base = job("llama3-405b", 8192, 2048, "h100")
    deep = replace(base, parallel=replace(base.parallel, tp=8, pp=16, dp=16, recompute="full"))
    make_plan(deep)
    times = [measured(lambda: make_plan(deep)) for _ in range(20)]
    print(f"plan: 405B, TP 8 × PP 16 × DP 16, 128 microbatches, replayed: {median(times) * 1e3:.1f} ms of CPU")
    spent_each = []
    for _ in range(ROUNDS):
        before = os.times()
        subprocess.run([sys.executable, "-m", "trigrid", *PROCESS.split()], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        spent_each.append(sum(after[2:4]) - sum(before[2:4]))
    print(f"process: `trigrid {PROCESS}`: {median(spent_each):.2f} CPU-s")


if __name__ == "__main__":
    main()
