"""Norms by the role of their weight: RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trigrid.spec.model import ModelSpec


class Norm:
    """The norm that the blocks and the head of a model use, over the last dimension."""

    def __init__(self, spec: ModelSpec):
        self._layer = spec.block == "gpt"
        self._eps = spec.norm_eps

    def inputs(self, w: Mapping[str, Tensor], role: str, x: Tensor) -> tuple[Tensor, ...]:
        """What a call takes for the norm called `role`: x, weight and, where there is one, bias."""
        return (x, w[role], w[f"{role}_bias"]) if self._layer else (x, w[role])

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._layer:
            return F.layer_norm(x, weight.shape, weight, bias, self._eps)
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, self._eps)
        return _RmsNorm.apply(x, weight, self._eps)  # type: ignore[no-untyped-call, no-any-return]


class _RmsNorm(torch.autograd.Function):
    """Keeps what torch's kernel for CUDA keeps; elsewhere torch has none, and its parts keep three times as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        rstd = mean.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        normal, wide = x * rstd, grad.to(rstd.dtype)
        parts = wide * normal
        of_weight = parts.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        mean = (parts @ weight.to(parts.dtype)).div_(x.shape[-1]).unsqueeze(-1)
        into = torch.mul(wide, weight, out=parts).addcmul_(normal, mean, value=-1).mul_(rstd)
        return into.to(x.dtype), of_weight, None
