"""What the engine itself costs on the host: CPU time of a step of tensors so small that kernels take next to nothing.

    python benchmarks/overhead.py [--rounds N]

What is left is dispatch and Python: of each operation, which plain PyTorch pays as well, and of the engine around it,
unit by unit and microbatch by microbatch. One process is measured beside the same Llama in plain PyTorch; layouts of
more are measured as one of their ranks on a process group without peers, where collectives and messages begin and end
and move nothing. Contestants take turns; figures are medians of the rounds.

The table has CPU microseconds for each unit (layers, embedding and head) and microbatch. If the engine's work is
proportional to both, they are alike in all rows, and the exponents that are fitted to the times of whole steps, over
layers at the most microbatches and over microbatches at the most layers, are 1. A step's fixed costs make them less,
caches that overflow more, plain PyTorch's as well; exit code 1 where one is above 1 and above plain PyTorch's by MORE.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from plain_llama import PlainTraining, random_batch
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trigrid.engine.comm import Comm
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.spec.job import Batch, Job, Optimizer, Run
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

SIZES = (8, 16, 32)
MORE = 0.1
CPU = torch.device("cpu")
# Of each layout the second pipeline rank, where there is one: it receives and sends.
LAYOUTS = {
    "one process": (0, {"zero": 0}),
    "ZeRO-2, dp 2": (0, {"dp": 2, "zero": 2}),
    "ZeRO-3, dp 2": (0, {"dp": 2, "zero": 3}),
    "tp 2, sequence parallel": (0, {"tp": 2, "zero": 0}),
    "pp 2, last stage": (1, {"pp": 2, "zero": 0}),
}
PLAIN = "plain PyTorch"


def job_of(layers: int, microbatches: int, fields: dict[str, int]) -> Job:
    """A tiny Llama; with `layers` and `microbatches` for each rank."""
    layout = Layout(**fields)  # type: ignore[arg-type]
    held = layers * layout.pp
    spec = ModelSpec(name="tiny", hidden=16, layers=held, heads=2, kv_heads=2, head_dim=8, ffn=16, vocab=16, context=8)
    batch = Batch(global_batch=microbatches * layout.dp, sequence=8, micro_batch=1)
    return Job(model=spec, batch=batch, run=Run(steps=9, precision="fp32"), optimizer=Optimizer(), parallel=layout)


@contextmanager
def alone(world: int, rank: int) -> Iterator[None]:
    """As one of `world` ranks whose peers do not exist."""
    if world == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def step_cpu_s(step: Callable[[Tensor, Tensor], object], rows: tuple[Tensor, Tensor]) -> float:
    """CPU seconds of a step, after one of a single microbatch, which makes what is made once."""
    step(*(part[:1] for part in rows))
    begun = time.process_time()
    step(*rows)
    return time.process_time() - begun


def measure(name: str, layers: int, microbatches: int) -> float:
    if name == PLAIN:
        job = job_of(layers, microbatches, {"zero": 0})
        plain, rows = PlainTraining(job, CPU), random_batch(job, 0, CPU)
        return step_cpu_s(plain.step, rows)
    rank, fields = LAYOUTS[name]
    job = job_of(layers, microbatches, fields)
    with alone(job.parallel.world, rank):
        engine = build_engine(job, Comm(grid_of(job), rank), CPU)
        one = replace(job, parallel=replace(job.parallel, dp=1), batch=replace(job.batch, global_batch=microbatches))
        rows = random_batch(one, 0, CPU)
        return step_cpu_s(partial(engine.step, lr=1e-3), rows)


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of log y over log x, by least squares."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / sum((x - x_mean) ** 2 for x in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    most = max(SIZES)
    grid = sorted({*((layers, most) for layers in SIZES), *((most, count) for count in SIZES)})
    names = (PLAIN, *LAYOUTS)
    times: dict[tuple[str, int, int], list[float]] = {}
    for number in range(rounds):
        for layers, count in grid:
            for name in names:
                times.setdefault((name, layers, count), []).append(measure(name, layers, count))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    seconds = {key: median(found) for key, found in times.items()}

    print(f"CPU microseconds for each unit and microbatch of a step, medians of {rounds} rounds in turn, one thread\n")
    print("| layers | microbatches | " + " | ".join(names) + " |")
    print("|---|---|" + "---|" * len(names))
    for layers, count in grid:
        # The last of two stages has no embedding.
        units = {name: layers + (1 if "stage" in name else 2) for name in names}
        shown = (f"{seconds[name, layers, count] / (units[name] * count) * 1e6:,.0f}" for name in names)
        print(f"| {layers} | {count} | " + " | ".join(shown) + " |")
    ratios = [
        mine / plain for mine, plain in zip(times["one process", most, most], times[PLAIN, most, most], strict=True)
    ]
    print(f"\none process ÷ plain PyTorch at {most} × {most}: {median(ratios):.2f}\n")
    print("| exponent over | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    fitted = {
        "layers": {n: exponent([(size, seconds[n, size, most]) for size in SIZES]) for n in names},
        "microbatches": {n: exponent([(size, seconds[n, most, size]) for size in SIZES]) for n in names},
    }
    for what, found in fitted.items():
        print(f"| {what} | " + " | ".join(f"{found[name]:.2f}" for name in names) + " |")
    bounds = {what: max(1.0, found[PLAIN]) + MORE for what, found in fitted.items()}
    steep = [f"{name} over {what}" for what, found in fitted.items() for name in LAYOUTS if found[name] > bounds[what]]
    if steep:
        raise SystemExit(f"more than proportional: {', '.join(steep)}")


if __name__ == "__main__":
    main()
