"""One GPU, a Llama of one billion parameters in bf16 with compiled blocks: the engine beside plain PyTorch.

    python benchmarks/gpu_one.py [--json FILE] [--uncompiled]
    python benchmarks/gpu_one.py --device cpu --small

Both train the same model from the same weights on the same random tokens. Contestants are built and warmed up one after
the other, so the peak of each is its own, and then take turns: a figure is a median of the rounds with its quartiles, a
ratio one of the rounds' own. MFU counts 6 operations for each parameter and token and those of attention, in full and
its causal half, over the catalogue's peak of the GPU (on another device over its best product, measured here).

Memory of the engine stands beside the planner's by category; what is above the state at the fullest moment is one
figure, and the planner says of what it should be. Plain PyTorch keeps weights, gradients and moments in fp32 and casts
weights at each use (autocast); the engine has bf16 weights and fp32 masters, gradients and moments: 16 and 18 bytes a
parameter.

--uncompiled adds both without torch.compile. --small is the same program on a tiny model, for a machine without a GPU;
its times say nothing. Exit code 2: there is no such device; 1: losses differ.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from plain_llama import PlainTraining, random_batch, spread
from torch import Tensor

from trigrid.blueprint.flops import train_flops_per_token
from trigrid.check.calibrate import of_catalogue
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.grid import grid_of
from trigrid.ledger import STATE
from trigrid.models.build import build_engine
from trigrid.plan.plan import Plan, make_plan
from trigrid.spec.job import Batch, Job, Optimizer, Run
from trigrid.spec.layout import Layout
from trigrid.spec.models import load_model
from trigrid.train.machine import matmul_flops_per_s

GIB = 2**30
WARM_UP = 3
# Losses of the first steps: products of bf16 in another order, and norms that are rounded at other places.
LOSS_OFF = 0.01


@dataclass
class Contestant:
    """step: tokens, labels → loss. rates: tokens per second of each round; peak_bytes, reserved_bytes: of CUDA's
    allocator, over what was there before."""

    name: str
    step: Callable[[Tensor, Tensor], float]
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    warm_up_s: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int = 0


def job_of(arguments: argparse.Namespace, device: torch.device) -> Job:
    spec, sequence, micro_batch, microbatches = load_model("llama3.2-1b"), 4096, 2, 8
    if arguments.small:
        spec = replace(spec, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256)
        sequence, micro_batch, microbatches = 64, 2, 2
    # The frequencies of its rotary positions are stretched for long texts, which plain_llama does not do.
    spec = replace(spec, context=sequence, rope_scaling=None)
    known = device.type == "cuda" and of_catalogue(
        torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    )
    job = Job(
        model=spec,
        batch=Batch(global_batch=micro_batch * microbatches, sequence=sequence, micro_batch=micro_batch),
        run=Run(steps=100, precision="bf16", compile=True, device=device.type),  # type: ignore[arg-type]
        optimizer=Optimizer(lr=1e-4),
        parallel=Layout(zero=0),
    )
    return replace(job, cluster=replace(job.cluster, gpu=known.name)) if known else job


def engine_of(job: Job, device: torch.device) -> Engine:
    return build_engine(job, Comm(grid_of(job), 0, device), device)


def built(job: Job, device: torch.device, name: str, compile: bool) -> tuple[Contestant, Engine | None]:
    """A contestant after its warm-up, with its memory, and the engine where it is one."""
    gc.collect()
    before = memory(device)
    job = replace(job, run=replace(job.run, compile=compile))
    engine: Engine | None = None
    if name == "trigrid":
        engine = engine_of(job, device)
        update = engine.step
        found = Contestant(name, lambda tokens, labels: update(tokens, labels, job.optimizer.lr).loss)
    else:
        plain = PlainTraining(job, device, compile)
        found = Contestant(name, lambda tokens, labels: float(plain.step(tokens, labels)))
    if not compile:
        found.name = f"{name}, not compiled"
    begun = time.perf_counter()
    for step in range(WARM_UP):
        if step == WARM_UP - 1 and device.type == "cuda":
            # The first steps make what is made once: kernels, moments, workspaces.
            torch.cuda.reset_peak_memory_stats(device)
        found.losses.append(found.step(*random_batch(job, step, device)))
    found.warm_up_s = time.perf_counter() - begun
    after = memory(device)
    found.peak_bytes, found.reserved_bytes = after[0] - before[1], after[2] - before[2]
    return found, engine


def memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes: at the peak, allocated now, reserved now. None are known on a CPU."""
    if device.type != "cuda":
        return 0, 0, 0
    torch.cuda.synchronize(device)
    return (
        torch.cuda.max_memory_allocated(device),
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device),
    )


def race(contestants: list[Contestant], job: Job, device: torch.device, rounds: int, steps: int) -> None:
    """Turns of `steps` steps, in one order and then in the other. A loss is read at the end of each step, which waits
    for the device."""
    tokens_per_step = job.batch.global_batch * job.batch.sequence
    for number in range(rounds):
        order = contestants if number % 2 == 0 else contestants[::-1]
        batches = [random_batch(job, WARM_UP + number * steps + step, device) for step in range(steps)]
        for contestant in order:
            begun = time.perf_counter()
            losses = [contestant.step(*rows) for rows in batches]
            contestant.rates.append(steps * tokens_per_step / (time.perf_counter() - begun))
            contestant.losses += losses
        told = ", ".join(f"{c.name} {c.rates[-1]:,.0f} tok/s" for c in contestants)
        print(f"round {number + 1} of {rounds}: {told}", file=sys.stderr, flush=True)


def speed_table(contestants: list[Contestant], job: Job, plan: Plan, peak_flops: float) -> str:
    full, causal = (train_flops_per_token(job.model, job.batch.sequence, causal=c) for c in (False, True))
    plain = next(c for c in contestants if c.name == "plain PyTorch")
    lines = [
        "| | tokens/s | quartiles | MFU, full | MFU, causal | ÷ plain PyTorch | peak GiB | warm-up s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in contestants:
        rate, low, high = spread(c.rates)
        ratio, least, most = spread([mine / theirs for mine, theirs in zip(c.rates, plain.rates, strict=True)])
        lines.append(
            f"| {c.name} | {rate:,.0f} | {low:,.0f} – {high:,.0f} | {rate * full / peak_flops:.1%} "
            f"| {rate * causal / peak_flops:.1%} | {ratio:.3f} [{least:.3f}, {most:.3f}] "
            f"| {c.peak_bytes / GIB:.2f} | {c.warm_up_s:.0f} |"
        )
    lines.append(
        f"| planned for {plan.machine.gpu.name}, not compiled | {plan.tokens_per_s:,.0f} | | "
        f"{plan.mfu_full_attention:.1%} | {plan.mfu_causal:.1%} | | {plan.fullest.memory.allocated_bytes / GIB:.2f} | |"
    )
    return "\n".join(lines)


def memory_rows(engine: Engine, contestant: Contestant, plan: Plan) -> list[tuple[str, int, int | None]]:
    """(category, planned, measured) bytes; what is not known on this device is None."""
    ledger, live = plan.fullest.memory.ledger, engine.live_bytes()
    rows: list[tuple[str, int, int | None]] = [(name, ledger[name], live[name]) for name in STATE]
    there = engine.device.type == "cuda"
    state = sum(live[name] for name in STATE)
    planned = {name: size for name, size in ledger.bytes.items() if name not in STATE}
    above = sum(size for name, size in planned.items() if name not in ("allocator", "runtime"))
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in planned.items() if size)
    rows.append(("above the state, at the peak", above, contestant.peak_bytes - state if there else None))
    rows.append(("peak, allocated", plan.fullest.memory.allocated_bytes, contestant.peak_bytes if there else None))
    rows.append(("reserved", plan.fullest.memory.reserved_bytes, contestant.reserved_bytes if there else None))
    print(f"planned at `{plan.fullest.memory.use.moment}`, GiB: {parts}\n", file=sys.stderr)
    return rows


def memory_table(rows: list[tuple[str, int, int | None]]) -> str:
    lines = ["| memory of the engine, GiB | planned, not compiled | measured | off |", "|---|---|---|---|"]
    for name, planned, measured in rows:
        seen = "not known here" if measured is None else f"{measured / GIB:.3f}"
        off = f"{planned / measured - 1:+.1%}" if measured else ""
        lines.append(f"| {name} | {planned / GIB:.3f} | {seen} | {off} |")
    return "\n".join(lines)


def check_losses(contestants: list[Contestant]) -> float:
    """The largest distance of a loss from the first contestant's at the same step, as a share of it."""
    first, *others = (c.losses for c in contestants)
    return max(abs(a - b) / abs(a) for losses in others for a, b in zip(first, losses, strict=True))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, a few steps")
    parser.add_argument("--uncompiled", action="store_true", help="also without torch.compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write figures and settings here")
    found = parser.parse_args()
    if found.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --small runs the same program here")
    if found.device == "cpu" and not found.small:
        parser.error("a billion parameters take too long on a CPU: --device cpu needs --small")
    if found.rounds < 1:
        parser.error("--rounds must be at least 1")
    return found


def accept_older_torch() -> None:
    """Leave out what torch.compile does not know yet before the torch that the project asks for: limits of a function's
    own, which one engine does not come near. GPUs are where they are, with the torch that is there."""
    compile, known = torch.compile, inspect.signature(torch.compile).parameters
    if "isolate_recompiles" not in known:
        torch.compile = lambda f, **named: compile(f, **{n: v for n, v in named.items() if n in known})


def main() -> None:
    asked = arguments()
    accept_older_torch()
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
    job = job_of(asked, device)
    rounds, steps = (1, 2) if asked.small else (asked.rounds, 4)
    plan = make_plan(replace(job, run=replace(job.run, compile=False)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {job.model.name} with {job.batch.sequence} tokens", file=sys.stderr)

    contestants: list[Contestant] = []
    rows: list[tuple[str, int, int | None]] = []
    for compile in (True, False) if asked.uncompiled else (True,):
        for who in ("trigrid", "plain PyTorch"):
            found, engine = built(job, device, who, compile)
            contestants.append(found)
            print(f"{found.name}: warm after {found.warm_up_s:.0f} s, loss {found.losses[-1]:.4f}", file=sys.stderr)
            if engine is not None and compile:
                rows = memory_rows(engine, found, plan)
    best = matmul_flops_per_s(torch.bfloat16, device)
    known = device.type == "cuda" and plan.machine.gpu.name == job.cluster.gpu
    peak = plan.machine.gpu.peak_flops["bf16"] if known else best
    race(contestants, job, device, rounds, steps)

    print(speed_table(contestants, job, plan, peak))
    print(f"\nMFU is of {peak / 1e12:,.3g} TFLOP/s; products alone reached {best / 1e12:,.3g}\n")
    print(memory_table(rows))
    off = check_losses(contestants)
    print(f"\nlosses: {contestants[0].losses[0]:.4f} → {contestants[0].losses[-1]:.4f}, at most {off:.1e} apart")
    if asked.json:
        figures = {
            c.name: {"tokens_per_s": c.rates, "peak_bytes": c.peak_bytes, "losses": c.losses} for c in contestants
        }
        settings = {"device": name, "torch": torch.__version__, "model": job.model.name, "tokens": job.batch.sequence}
        asked.json.write_text(json.dumps({**settings, "memory": rows, "contestants": figures}, indent=1))
    if off > LOSS_OFF:
        raise SystemExit(f"losses are {off:.1%} apart, more than {LOSS_OFF:.0%}")


if __name__ == "__main__":
    main()
