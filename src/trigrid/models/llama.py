"""A block of Llama (Touvron 2023), Mistral and Qwen: RMSNorm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from trigrid.engine.again import make
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.units import Microbatch
from trigrid.models.attention import Attention
from trigrid.models.block import Block, column_layers, row_layer
from trigrid.models.rope import Rope, rotate
from trigrid.spec.model import ModelSpec


class LlamaBlock(Block):
    def __init__(
        self, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, device: torch.device, attention: Attention
    ):
        super().__init__(spec, tp, attention)
        self._rope = Rope(spec, dtype, device)
        self._norms_heads = spec.qk_norm

    def prepare(self, microbatch: Microbatch) -> Tensor | None:
        self._rope.tables(microbatch.tokens_SB.shape[0])
        return super().prepare(microbatch)

    def _place(self, w: Mapping[str, Tensor], q_SBND: Tensor, k_SBMD: Tensor, selective: bool) -> tuple[Tensor, Tensor]:
        cos, sin = self._rope.tables(q_SBND.shape[0])
        if not self._norms_heads:
            # Made of nothing that is kept anyway.
            return rotate(q_SBND, cos, sin), rotate(k_SBMD, cos, sin)

        def turn(x_SBND: Tensor, weight: Tensor) -> Tensor:
            return rotate(self._norm(x_SBND, weight), cos, sin)

        if selective:
            return make(turn, q_SBND, w["q_norm"]), make(turn, k_SBMD, w["k_norm"])
        return turn(q_SBND, w["q_norm"]), turn(k_SBMD, w["k_norm"])

    def _feed_forward(self, w: Mapping[str, Tensor], x_SBH: Tensor, selective: bool) -> Tensor:
        normed = self._norm.inputs(w, "ffn_norm", x_SBH)
        gate_and_up = self._tp.column(self._norm, normed, column_layers(w, "gate", "up"), again=selective)
        return self._tp.row(_swiglu, gate_and_up, row_layer(w, "down"), again=selective)


def _swiglu(gate_SBF: Tensor, up_SBF: Tensor) -> Tensor:
    return F.silu(gate_SBF) * up_SBF
