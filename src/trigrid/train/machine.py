"""What this machine can do, measured while all ranks are at it: ranks that share cores share the rate."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from trigrid.report.host import peak_resident_bytes

MATMUL_SIZE = {"cpu": 512, "cuda": 8192}
WINDOWS, WINDOW_S = 3, 0.15


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
