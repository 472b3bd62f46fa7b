"""What this machine can do, measured while all ranks are at it: ranks that share cores share the rate."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from trigrid.engine.matmul import ProductError, product_error
from trigrid.engine.runtime import Engine
from trigrid.errors import Problem, Refused
from trigrid.report.host import peak_resident_bytes
from trigrid.spec.job import Job

MATMUL_SIZE = {"cpu": 512, "cuda": 8192}
WINDOWS, WINDOW_S = 3, 0.15
CHECKED_ROWS = 256
"""Tokens at most in the products whose error is measured."""
AS_EXACT = 8.0
"""Times that of "highest" up to which a CPU's error is of fp32 level; TF32 has a thousand times, bf16 ten thousand."""


def check_products(engine: Engine) -> str:
    """The error of fp32 products by run.matmul_precision on the rank where it is largest, in words; empty where there
    is none to ask after. Every rank must call it.

    Raises Refused where a CPU's is beyond fp32-level.
    """
    run, batch, comm = engine.job.run, engine.job.batch, engine.comm
    name = run.matmul_precision
    if run.precision != "fp32" or name == "highest":
        return ""
    entries = [entry for bucket in engine.buckets.values() for entry in bucket.layout.entries]
    matrices = [(e.local.shape[0], e.local.shape[1]) for e in entries if len(e.local.shape) == 2]
    rows = min(CHECKED_ROWS, batch.micro_batch * batch.sequence)
    found = comm.gather_objects(product_error(name, matrices, rows, engine.device))
    errors = [error for error in found if isinstance(error, ProductError)]
    return judged(name, errors, engine.device)


def judged(name: str, errors: Sequence[ProductError], device: torch.device) -> str:
    """As `check_products`, of what each rank has measured."""
    rank, worst = max(enumerate(errors), key=lambda found: found[1].times)
    shape = " × ".join(map(str, worst.shape))
    told = f"a product of {shape} on rank {rank} is {worst.error:.1e} off fp64, and {worst.highest:.1e} with highest"
    if device.type == "cpu" and worst.times > AS_EXACT:
        reason = f"{told}: this CPU multiplies in a format of fewer bits"
        raise Refused([Problem("run.matmul_precision", name, reason, ("highest",))])
    return f"run.matmul_precision = {name}: {told}"


def check_compiler(job: Job, device: torch.device) -> None:
    """Raise Refused where run.compile lacks what it needs here."""
    if not job.run.compile:
        return
    # torch's compiler takes a second to load.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton_package

    lack = ""
    if device.type == "cuda":
        lack = "" if has_triton_package() else "the package triton, which makes kernels for CUDA, is not installed"
    else:
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            lack = "there is no C++ compiler for kernels of a CPU: neither g++ nor what CXX names"
    if lack:
        raise Refused([Problem("run.compile", "true", lack, ("false",))])


def matmul_flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Rate of square matrix products in `dtype` on this rank: what its MFU is a share of."""
    size = MATMUL_SIZE[device.type]
    a, b = torch.randn(size, size, device=device).to(dtype), torch.randn(size, size, device=device).to(dtype)
    for _ in range(2):
        a @ b
    # The best of a few windows: another program may take the cores in one of them.
    return max(_products_per_s(a, b, device) for _ in range(WINDOWS)) * 2.0 * size**3


def _products_per_s(a: Tensor, b: Tensor, device: torch.device) -> float:
    done = 0
    _synchronise(device)
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < WINDOW_S:
        a @ b
        done += 1
        _synchronise(device)
    return done / elapsed


def peak_memory_bytes(device: torch.device) -> int:
    """Peak so far of this process: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
