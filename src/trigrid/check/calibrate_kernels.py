"""What one device does: matrix products by shape, attention by sequence, passes over memory, starting kernels."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from math import prod
from statistics import fmean, median
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from trigrid.blueprint.claims import claims
from trigrid.blueprint.decoder import decoder
from trigrid.check.calibrate_fit import fit_attention, fit_passes, fit_products
from trigrid.check.calibrate_meter import Meter, ends_first
from trigrid.check.calibrate_operations import Functions
from trigrid.engine.comm import Comm
from trigrid.grid import grid_of
from trigrid.models.attention import causal_attention
from trigrid.models.build import build_engine
from trigrid.plan.measured import Attention, Launch, Passes, Products
from trigrid.plan.software import engine_software
from trigrid.spec.job import Batch, Job, Optimizer, Run
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Sides of products that are tried without a job, or around its own.
SIDES = {"cpu": (64, 256, 1024), "cuda": (512, 2048, 8192)}
SEQUENCES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192, 16384)}
PASS_BYTES = {"cpu": tuple(2**n for n in range(14, 27, 2)), "cuda": tuple(2**n for n in range(20, 31, 2))}
HEADS, HEAD_DIM = {"cpu": 4, "cuda": 16}, {"cpu": 64, "cuda": 128}
CHAIN, TURNS = 64, 5
# Larger than the caches near the cores.
COLD_BYTES = {"cpu": 2**25, "cuda": 2**27}
ALONE = Layout(sequence_parallel=False)
SMALL = Job(
    model=ModelSpec(name="small", hidden=16, layers=4, heads=2, kv_heads=2, head_dim=8, ffn=16, vocab=16, context=16),
    batch=Batch(global_batch=8, sequence=8, micro_batch=1),
    run=Run(steps=1, precision="fp32"),
    optimizer=Optimizer(),
    parallel=ALONE,
)
# A product that would take more than so many times what a sweep has for one is left out.
TOO_LONG = 9.0

Product = tuple[int, int, int]
Form = Literal["forward", "input", "weight"]
"""A product of weights, or of its backward the gradient of its input or of its weight."""
FORMS: tuple[Form, ...] = get_args(Form)


def usual(device: str) -> Job:
    """A job of a usual model, for what depends on one where there is none."""
    hidden = HEADS[device] * HEAD_DIM[device]
    model = ModelSpec(
        name="usual",
        hidden=hidden,
        layers=1,
        heads=HEADS[device],
        kv_heads=HEADS[device],
        head_dim=HEAD_DIM[device],
        ffn=3 * hidden,
        vocab=8 * hidden,
        context=SEQUENCES[device][-1],
    )
    return replace(SMALL, model=model)


class Heads(NamedTuple):
    """Attention of one rank: sequences of a microbatch, query and KV heads, their width, lengths to try."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    sequences: tuple[int, ...]


def products_of(job: Job | None, layouts: Sequence[Layout], device: str) -> dict[Product, tuple[Form, ...]]:
    """(m, n, k) of the job's products on one rank of its own and of other layouts, with the forms that have them, and
    of a grid in every form."""
    found: list[tuple[Product, Form]] = []
    if job is not None:
        tokens, kernels = job.batch.micro_batch * job.batch.sequence, engine_software(job).kernels
        kinds = sorted({unit.kind for unit in decoder(job.model).units})
        gemms = [gemm for kind in kinds for gemm in claims(job.model, kind, kernels).gemms if not gemm.routed]
        for tp in sorted({job.parallel.tp, *(layout.tp for layout in layouts)}):
            for gemm in gemms:
                n = gemm.out // min(tp, gemm.pieces or tp) if gemm.cut == "out" else gemm.out
                k = gemm.into // tp if gemm.cut == "into" else gemm.into
                found += zip(((tokens, n, k), (tokens, k, n), (n, k, tokens)), FORMS, strict=True)
    sides = SIDES[device]
    grid = list(product(sides, sides, sides))
    # In an order that tells all parameters apart early, should time run out.
    random.Random(0).shuffle(grid)
    by_shape: dict[Product, tuple[Form, ...]] = {}
    for shape, form in dict.fromkeys(found):
        by_shape[shape] = (*by_shape.get(shape, ()), form)
    return by_shape | {shape: FORMS for shape in grid if shape not in by_shape}


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
    meter: Meter, shapes: Mapping[Product, tuple[Form, ...]], number_format: str, seconds: float, start_s: float
) -> Products:
    """Of each shape the mean of its forms. start_s: what starting an operation takes, which is taken off where nothing
    else is done meanwhile."""
    dtype, device = DTYPES[number_format], meter.device
    side = SIDES[device.type][1]
    far = Far(dtype, device)
    rate = 2 * side**3 / meter.seconds(_product((side, side, side), "forward", far), 0.02 * seconds)
    able = [s for s in shapes if 2 * s[0] * s[1] * s[2] / rate < TOO_LONG * seconds / len(shapes)]
    points = []
    for shape, within in meter.within(f"products in {number_format}", able or [(side, side, side)], seconds):
        forms = shapes.get(shape, FORMS)
        spent = [meter.seconds(_product(shape, form, far), within / len(forms)) for form in forms]
        points.append((*shape, _beyond(fmean(spent), start_s, device)))
    return fit_products(tuple(points))


def _beyond(spent: float, start_s: float, device: torch.device) -> float:
    """What a kernel takes besides its start, which is priced by itself."""
    return max(spent / 2, spent - start_s) if device.type == "cpu" else spent


class Far:
    """Matrices that were not used for a while: parts of what does not fit into the caches, in turns."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        numel = COLD_BYTES[device.type] // dtype.itemsize
        # What is written must not be read: its numbers would grow from product to product.
        self._read, self._written = self.near(numel), torch.empty(numel, dtype=dtype, device=device)

    def near(self, *sides: int) -> Tensor:
        return torch.randn(*sides, device=self.device).to(self.dtype)

    def read(self, *sides: int) -> Iterator[Tensor]:
        # Zeros would draw less power, and so be multiplied faster.
        return self._parts(self._read if prod(sides) <= self._read.numel() else self.near(*sides), sides)

    def written(self, *sides: int) -> Iterator[Tensor]:
        whole = self._written
        return self._parts(whole if prod(sides) <= whole.numel() else whole.new_empty(sides), sides)

    def _parts(self, whole: Tensor, sides: tuple[int, ...]) -> Iterator[Tensor]:
        count = whole.numel() // prod(sides)
        return cycle(whole.view(-1)[: count * prod(sides)].view(count, *sides).unbind())


def _product(shape: Product, form: Form, far: Far) -> Callable[[], Tensor]:
    """A call of it as a training step has it: what was just computed may be in the caches, weights and what was kept
    since forward are not."""
    m, n, k = shape
    if form == "weight":
        gradient_KM, inputs_KN, sums_MN = far.near(k, m), far.read(k, n), far.written(m, n)
        return lambda: torch.mm(gradient_KM.t(), next(inputs_KN), out=next(sums_MN))
    x_MK = far.near(m, k)
    if form == "forward":
        weights_NK = far.read(n, k)
        return lambda: F.linear(x_MK, next(weights_NK))
    weights_KN = far.read(k, n)
    return lambda: x_MK @ next(weights_KN)


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

        def attend(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return causal_attention(q, k, v, None, None, False)

        alone, back = meter.both_ways(attend, (q, k, v), within)
        points.append((heads.batch, heads.heads, sequence, heads.head_dim, alone, back))
    return fit_attention(tuple(points))


def measure_passes(meter: Meter, seconds: float, start_s: float) -> Passes:
    """Sums of two tensors, within caches and beyond them, into a third, which is new each time, as in a training step:
    three times their bytes are moved."""
    points = []
    for size, within in meter.within("memory", ends_first(PASS_BYTES[meter.device.type]), seconds):
        x, y = (torch.ones(size // 4, device=meter.device) for _ in range(2))
        spent = meter.seconds(partial(torch.add, x, y), within)
        points.append((3 * size, _beyond(spent, start_s, meter.device)))
    return fit_passes(tuple(points))


def measure_start(meter: Meter, seconds: float) -> float:
    """What an operation takes that does next to nothing, autograd included: a chain of them on few numbers, forward and
    backward, of which backward starts two for each."""
    x = torch.ones(8, device=meter.device, requires_grad=True)
    w = torch.ones(8, device=meter.device, requires_grad=True)

    def chain() -> object:
        y = x
        for _ in range(CHAIN):
            y = y * w
        return torch.autograd.grad(y.sum(), (x, w))

    meter.progress("launches", 0, 1)
    return meter.seconds(chain, seconds) / (3 * CHAIN)


def measure_launch(meter: Meter, seconds: float) -> Launch:
    """What the host needs for each kernel that the blueprint claims, with all that the engine does around it: forward
    and backward of a decoder too small for anything else to take time. On a CPU the host is who computes, too, and what
    `measure_operations` measures has all that the host does for it in it: that is taken off, measured in turns."""
    engine = build_engine(SMALL, Comm(grid_of(SMALL), 0, meter.device), meter.device)
    microbatches, size = SMALL.batch.microbatches(SMALL.parallel), SMALL.batch.sequence
    tokens = torch.zeros((microbatches, SMALL.batch.micro_batch, size), dtype=torch.int64)
    blocking, functions = meter.device.type == "cpu", Functions(SMALL, torch.float32, meter.device)
    kernels, started, own = engine_software(SMALL).kernels, 0, Counter[str]()
    for unit in decoder(SMALL.model).units:
        claimed = claims(SMALL.model, unit.kind, kernels)
        started += len(claimed.gemms) + 2 * len(claimed.attends)
        for item in claimed.passes:
            if blocking and item.operation:
                own[item.operation] += 1
            else:
                started += item.kernels
    within, found = seconds / TURNS / (1 + len(own)), []
    for _ in range(TURNS):
        all_ = meter.seconds(lambda: engine.accumulate(tokens, tokens), within) / microbatches
        known = sum(count * sum(meter.both_ways(*functions.of(name, size), within)) for name, count in own.items())
        found.append(max(all_ - known, all_ / 10) / (3 * started))
    return Launch(median(found), blocking)
