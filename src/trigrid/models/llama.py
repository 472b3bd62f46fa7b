"""A block of Llama (Touvron 2023), Mistral and Qwen: RMSNorm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from trigrid.engine.tensor import TensorParallel
from trigrid.engine.units import Microbatch
from trigrid.models.attention import Attention, DocumentMasks
from trigrid.models.norms import norm_of
from trigrid.models.rope import Rope, rotate
from trigrid.spec.model import ModelSpec


class LlamaBlock:
    """The function of every block of a model."""

    def __init__(
        self, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, device: torch.device, attention: Attention
    ):
        self._spec = spec
        self._tp = tp
        self._rope = Rope(spec, dtype, device)
        self._attention = attention
        self._masks = DocumentMasks()
        self._norm = norm_of(spec)

    def __call__(self, w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch) -> Tensor:
        x_SBH = x_SBH + self._attend(w, self._norm(w, "attention_norm", x_SBH), self._masks.of(microbatch))
        return x_SBH + self._feed_forward(w, self._norm(w, "ffn_norm", x_SBH))

    def _attend(self, w: Mapping[str, Tensor], x_SBH: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        qkv = self._tp.column(x_SBH, *((w[role], w.get(f"{role}_bias")) for role in "qkv"))
        q_SBND, k_SBMD, v_SBMD = (y.view(*y.shape[:2], -1, self._spec.head_dim) for y in qkv)
        if self._spec.qk_norm:
            q_SBND, k_SBMD = self._norm(w, "q_norm", q_SBND), self._norm(w, "k_norm", k_SBMD)
        cos, sin = self._rope.tables(q_SBND.shape[0])
        q_SBND, k_SBMD = rotate(q_SBND, cos, sin), rotate(k_SBMD, cos, sin)
        q_BNSD, k_BMSD, v_BMSD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_SBMD, v_SBMD))
        o_BNSD = self._attention(q_BNSD, k_BMSD, v_BMSD, mask_B1SS)
        return self._tp.leave(F.linear(o_BNSD.permute(2, 0, 1, 3).flatten(2), w["o"]))

    def _feed_forward(self, w: Mapping[str, Tensor], x_SBH: Tensor) -> Tensor:
        gate_SBF, up_SBF = self._tp.column(x_SBH, (w["gate"], None), (w["up"], None))
        return self._tp.leave(F.linear(F.silu(gate_SBF) * up_SBF, w["down"]))
