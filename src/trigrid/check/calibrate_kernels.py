"""What one device does: matrix products by shape, attention by sequence, passes over memory, starting kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trigrid.blueprint.claims import claims
from trigrid.blueprint.decoder import decoder
from trigrid.check.calibrate_fit import fit_attention, fit_passes, fit_products
from trigrid.check.calibrate_meter import Meter, ends_first
from trigrid.models.attention import causal_attention
from trigrid.plan.measured import Attention, Launch, Passes, Products
from trigrid.plan.software import engine_software
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Sides of products that are tried without a job, or around its own.
SIDES = {"cpu": (64, 256, 1024), "cuda": (512, 2048, 8192)}
SEQUENCES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192, 16384)}
PASS_BYTES = {"cpu": tuple(2**n for n in range(14, 27, 2)), "cuda": tuple(2**n for n in range(20, 31, 2))}
HEADS, HEAD_DIM = {"cpu": 4, "cuda": 16}, {"cpu": 64, "cuda": 128}
CHAIN = 64
# A product that would take more than so many times what there is for one is left out.
TOO_LONG = 3.0

Product = tuple[int, int, int]


class Heads(NamedTuple):
    """Attention of one rank: sequences of a microbatch, query and KV heads, their width, lengths to try."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    sequences: tuple[int, ...]


def products_of(job: Job | None, layouts: Sequence[Layout], device: str) -> list[Product]:
    """(m, n, k) of the job's products on one rank of its own and of other layouts, forward and both of backward, and of
    a grid."""
    found: list[Product] = []
    if job is not None:
        tokens, kernels = job.batch.micro_batch * job.batch.sequence, engine_software(job).kernels
        kinds = sorted({unit.kind for unit in decoder(job.model).units})
        gemms = [gemm for kind in kinds for gemm in claims(job.model, kind, kernels).gemms if not gemm.routed]
        for tp in sorted({job.parallel.tp, *(layout.tp for layout in layouts)}):
            for gemm in gemms:
                n = gemm.out // min(tp, gemm.pieces or tp) if gemm.cut == "out" else gemm.out
                k = gemm.into // tp if gemm.cut == "into" else gemm.into
                found += [(tokens, n, k), (tokens, k, n), (n, k, tokens)]
    sides = SIDES[device]
    grid = list(product(sides, sides, sides))
    # In an order that tells all parameters apart early, should time run out.
    random.Random(0).shuffle(grid)
    return list(dict.fromkeys(found + grid))


def heads_of(job: Job | None, device: str) -> Heads:
    """The job's attention on one rank, or a usual one."""
    if job is None:
        return Heads(1, HEADS[device], HEADS[device], HEAD_DIM[device], SEQUENCES[device])
    model, tp, length = job.model, job.parallel.tp, job.batch.sequence
    tried = sorted({length, *(max(16, length * part // 4) for part in (1, 2, 8))})
    return Heads(
        job.batch.micro_batch, max(1, model.heads // tp), max(1, model.kv_heads // tp), model.head_dim, tuple(tried)
    )


def measure_products(
    meter: Meter, shapes: Sequence[Product], number_format: str, seconds: float, launch: Launch
) -> Products:
    """What starting a kernel takes is taken off where nothing else is done meanwhile."""
    dtype, device = DTYPES[number_format], meter.device
    side = SIDES[device.type][1]
    rate = 2 * side**3 / meter.seconds(_product(side, side, side, dtype, device), 0.02 * seconds)
    able = [s for s in shapes if 2 * s[0] * s[1] * s[2] / rate < TOO_LONG * seconds / len(shapes)]
    points = []
    for (m, n, k), within in meter.within(f"products in {number_format}", able or [(side, side, side)], seconds):
        spent = meter.seconds(_product(m, n, k, dtype, device), within)
        points.append((m, n, k, _beyond(spent, launch)))
    return fit_products(tuple(points))


def _beyond(spent: float, launch: Launch) -> float:
    """What a kernel takes besides its launch, which is priced by itself."""
    return max(spent / 2, spent - launch.seconds) if launch.blocking else spent


def _product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    x_MK = torch.randn(m, k, device=device).to(dtype)
    w_NK = torch.randn(n, k, device=device).to(dtype)
    return lambda: F.linear(x_MK, w_NK)


def measure_attention(meter: Meter, heads: Heads, number_format: str, seconds: float) -> Attention:
    """The engine's fused attention, forward, and forward with backward."""
    points = []
    for sequence, within in meter.within(f"attention in {number_format}", heads.sequences, seconds):
        shape = {True: heads.heads, False: heads.kv_heads}
        q, k, v = (
            torch.randn(
                heads.batch, shape[query], sequence, heads.head_dim, dtype=DTYPES[number_format], device=meter.device
            ).requires_grad_()
            for query in (True, False, False)
        )
        gradient = torch.randn_like(q)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return causal_attention(q, k, v, None, None, False)

        def both(q: Tensor = q, k: Tensor = k, v: Tensor = v, gradient: Tensor = gradient) -> object:
            return torch.autograd.grad(causal_attention(q, k, v, None, None, False), (q, k, v), gradient)

        alone = meter.seconds(forward, within / 3)
        back = max(meter.seconds(both, within * 2 / 3) - alone, alone / 10)
        points.append((heads.batch, heads.heads, sequence, heads.head_dim, alone, back))
    return fit_attention(tuple(points))


def measure_passes(meter: Meter, seconds: float, launch: Launch) -> Passes:
    """Sums of two tensors, within caches and beyond them, into a third, which is new each time, as in a training step:
    three times their bytes are moved."""
    points = []
    for size, within in meter.within("memory", ends_first(PASS_BYTES[meter.device.type]), seconds):
        x, y = (torch.ones(size // 4, device=meter.device) for _ in range(2))
        spent = meter.seconds(partial(torch.add, x, y), within)
        points.append((3 * size, _beyond(spent, launch)))
    return fit_passes(tuple(points))


def measure_launch(meter: Meter, seconds: float) -> Launch:
    """What the host needs for a kernel, autograd included: a chain of operations on few numbers, forward and backward,
    of which backward starts two for each; on a CPU the host is who computes, too."""
    x = torch.ones(8, device=meter.device, requires_grad=True)
    w = torch.ones(8, device=meter.device, requires_grad=True)

    def chain() -> object:
        y = x
        for _ in range(CHAIN):
            y = y * w
        return torch.autograd.grad(y.sum(), (x, w))

    meter.progress("launches", 0, 1)
    return Launch(meter.seconds(chain, seconds) / (3 * CHAIN), meter.device.type == "cpu")
