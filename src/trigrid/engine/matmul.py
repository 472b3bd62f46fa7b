"""How exactly products of fp32 matrices are computed, by the names of `torch.set_float32_matmul_precision`.

What "high" and "medium" do depends on the machine: on CUDA both are TF32; on a CPU oneDNN takes formats of fewer bits
where the CPU multiplies them, else its own fp32 kernels, which may be faster than the default's. So it is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trigrid.spec.job import MatmulPrecision

BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
CHECKED = 64
"""Rows and columns of a product that are computed once more in fp64."""


@contextmanager
def matmul_precision(name: MatmulPrecision) -> Iterator[None]:
    """Products of fp32 matrices are computed so within; afterwards, whatever was set before is again."""
    before = [backend.fp32_precision for backend in BACKENDS]
    try:
        word = torch.get_float32_matmul_precision()
    except RuntimeError:
        # torch has no one word for a program that has set its backends apart.
        word = "highest"
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(word)
        for backend, value in zip(BACKENDS, before, strict=True):
            backend.fp32_precision = value


class ProductError(NamedTuple):
    """error: of a product of (m, n, k), ‖Δ‖ ÷ ‖product‖ against fp64; highest: the same product's as "highest"."""

    error: float
    highest: float
    shape: tuple[int, int, int]

    @property
    def times(self) -> float:
        """How many times that of "highest" it is."""
        return self.error / self.highest


def product_error(
    name: MatmulPrecision, weights: Iterable[tuple[int, int]], rows: int, device: torch.device
) -> ProductError:
    """The product that `name` makes worst, of those that training with `rows` tokens makes with `weights` [n, k]:
    forward, of the input's gradient and of the weight's."""
    shapes = {shape for n, k in weights for shape in ((rows, n, k), (rows, k, n), (n, k, rows))}
    return max((_error(name, shape, device) for shape in sorted(shapes)), key=lambda found: found.times)


def _error(name: MatmulPrecision, shape: tuple[int, int, int], device: torch.device) -> ProductError:
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(0)
    x_MK, w_NK = (torch.randn(size, k, generator=generator, device=device) for size in (m, n))
    exact = x_MK[:CHECKED].double() @ w_NK[:CHECKED].double().t()
    return ProductError(_off(x_MK, w_NK, exact, name), _off(x_MK, w_NK, exact, "highest"), shape)


def _off(x_MK: Tensor, w_NK: Tensor, exact: Tensor, name: MatmulPrecision) -> float:
    with matmul_precision(name):
        found = F.linear(x_MK, w_NK)[:CHECKED, :CHECKED]
    return float((found - exact).norm() / exact.norm())
