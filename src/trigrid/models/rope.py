"""Rotary positions (Su 2021), with Llama-3's frequency scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trigrid.spec.model import ModelSpec, RopeScaling


class Rope:
    """Tables of cosines and sines, made once for the longest sequence seen.

    Angles are computed in fp64: in fp32 they lose a digit every ten-fold of the position.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device):
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64, device=device) / spec.head_dim
        self._frequencies = spec.rope_theta**-exponents
        if spec.rope_scaling is not None:
            self._frequencies = _scaled(self._frequencies, spec.rope_scaling)
        self._dtype = dtype
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, sequence: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each [sequence, 1, 1, head_dim ÷ 2]."""
        if self._tables is None or self._tables[0].shape[0] < sequence:
            positions = torch.arange(sequence, dtype=torch.float64, device=self._frequencies.device)
            angles = torch.outer(positions, self._frequencies)[:, None, None]
            self._tables = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        cos, sin = self._tables
        return cos[:sequence], sin[:sequence]


def rotate(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) of the last dimension by its position's angle."""
    if torch.compiler.is_compiling():
        a, b = x_SBND.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return _Rotate.apply(x_SBND, cos, sin)  # type: ignore[no-untyped-call, no-any-return]


def rotate_heads(qkv_SBED: Tensor, heads: tuple[int, int, int], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, of which there are so many `heads` side by side; the first two rotated."""
    if torch.compiler.is_compiling():
        q_SBND, k_SBMD, v_SBMD = qkv_SBED.split_with_sizes(heads, 2)
        return rotate(q_SBND, cos, sin), rotate(k_SBMD, cos, sin), v_SBMD.contiguous()
    return _RotateHeads.apply(qkv_SBED, heads, cos, sin)  # type: ignore[no-untyped-call, no-any-return]


def _turn(x_SBND: Tensor, cos: Tensor, sin: Tensor, back: int, out: Tensor) -> Tensor:
    """Rotates x into `out`, or back where `back` is −1."""
    (a, b), (of_a, of_b) = x_SBND.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=of_a).addcmul_(b, sin, value=-back)
    torch.mul(b, cos, out=of_b).addcmul_(a, sin, value=back)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1, torch.empty_like(x, memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1, torch.empty_like(grad, memory_format=torch.contiguous_format)), None, None


class _RotateHeads(torch.autograd.Function):
    """Values are copied, so that the product whose parts all three are need not be kept for them; the three gradients
    are written where it takes its own from."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: tuple[int, int, int], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads = heads
        ctx.save_for_backward(cos, sin)
        q, k, v = qkv.split_with_sizes(heads, 2)
        q, k = (_turn(x, cos, sin, 1, x.new_empty(x.shape)) for x in (q, k))
        return q, k, v.clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        first = grads[0]
        into = first.new_empty((*first.shape[:2], sum(ctx.heads), first.shape[-1]))
        of_q, of_k, of_v = into.split_with_sizes(ctx.heads, 2)
        for grad, out in ((grads[0], of_q), (grads[1], of_k)):
            _turn(grad, cos, sin, -1, out)
        of_v.copy_(grads[2])
        return into, None, None, None


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = smooth.clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)
