"""A block of Llama (Touvron 2023), Mistral and Qwen: RMSNorm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trigrid.engine.again import make
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.units import Microbatch
from trigrid.models.attention import Attention
from trigrid.models.block import Block, column_layers, row_layer
from trigrid.models.rope import Rope, rotate, rotate_heads
from trigrid.spec.model import ModelSpec


class LlamaBlock(Block):
    def __init__(
        self, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, device: torch.device, attention: Attention
    ):
        super().__init__(spec, tp, attention)
        self._rope = Rope(spec, dtype, device)
        self._norms_heads = spec.qk_norm

    def prepare(self, microbatch: Microbatch, dtype: torch.dtype) -> Tensor | None:
        self._rope.tables(microbatch.tokens_SB.shape[0])
        return super().prepare(microbatch, dtype)

    def _place(
        self, w: Mapping[str, Tensor], qkv_SBED: Tensor, heads: tuple[int, int, int], selective: bool
    ) -> tuple[Tensor, ...]:
        cos, sin = self._rope.tables(qkv_SBED.shape[0])
        if not self._norms_heads:
            return rotate_heads(qkv_SBED, heads, cos, sin)

        def turn(x_SBND: Tensor, weight: Tensor) -> Tensor:
            return rotate(self._norm(x_SBND, weight), cos, sin)

        q_SBND, k_SBMD, v_SBMD = qkv_SBED.split_with_sizes(heads, 2)
        if selective:
            return make(turn, q_SBND, w["q_norm"]), make(turn, k_SBMD, w["k_norm"]), v_SBMD
        return turn(q_SBND, w["q_norm"]), turn(k_SBMD, w["k_norm"]), v_SBMD

    def _feed_forward(self, w: Mapping[str, Tensor], x_SBH: Tensor, selective: bool) -> Tensor:
        normed = self._norm.inputs(w, "ffn_norm", x_SBH)
        gate_and_up = self._tp.column(self._norm, normed, column_layers(w, "gate", "up"), again=selective)
        return self._tp.row(swiglu, [gate_and_up], row_layer(w, "down"), again=selective)


def swiglu(gate_and_up_SBF: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension, times the second (Shazeer 2020)."""
    if torch.compiler.is_compiling():
        gate_SBF, up_SBF = gate_and_up_SBF.chunk(2, -1)
        return F.silu(gate_SBF) * up_SBF
    return _SwiGlu.apply(gate_and_up_SBF)  # type: ignore[no-untyped-call, no-any-return]


class _SwiGlu(torch.autograd.Function):
    """Keeps its input alone: SiLU is computed again in backward, and both gradients are written where the product
    before takes them from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        into = torch.empty_like(x)
        of_gate, of_up = into.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return into
