"""A block of GPT-2 and GPT-3 (Radford 2019, Brown 2020): LayerNorm, biases everywhere, GELU."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from trigrid.engine.tensor import TensorParallel
from trigrid.engine.units import Microbatch
from trigrid.models.attention import Attention, DocumentMasks
from trigrid.models.norms import norm_of
from trigrid.spec.model import ModelSpec


class GptBlock:
    """The function of every block of a model. GELU is its approximation by tanh (Hendrycks and Gimpel 2016), as there.

    A bias behind a sum over TP is added once, after it.
    """

    def __init__(self, spec: ModelSpec, tp: TensorParallel, attention: Attention):
        self._spec = spec
        self._tp = tp
        self._attention = attention
        self._masks = DocumentMasks()
        self._norm = norm_of(spec)

    def __call__(self, w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch) -> Tensor:
        x_SBH = x_SBH + self._attend(w, self._norm(w, "attention_norm", x_SBH), self._masks.of(microbatch))
        return x_SBH + self._feed_forward(w, self._norm(w, "ffn_norm", x_SBH))

    def _attend(self, w: Mapping[str, Tensor], x_SBH: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        qkv = self._tp.column(x_SBH, *((w[role], w[f"{role}_bias"]) for role in "qkv"))
        q_BNSD, k_BNSD, v_BNSD = (y.view(*y.shape[:2], -1, self._spec.head_dim).permute(1, 2, 0, 3) for y in qkv)
        o_BNSD = self._attention(q_BNSD, k_BNSD, v_BNSD, mask_B1SS)
        return self._tp.leave(F.linear(o_BNSD.permute(2, 0, 1, 3).flatten(2), w["o"])) + w["o_bias"]

    def _feed_forward(self, w: Mapping[str, Tensor], x_SBH: Tensor) -> Tensor:
        (up_SBF,) = self._tp.column(x_SBH, (w["up"], w["up_bias"]))
        return self._tp.leave(F.linear(F.gelu(up_SBF, approximate="tanh"), w["down"])) + w["down_bias"]
