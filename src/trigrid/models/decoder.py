"""A Llama-style decoder (Touvron 2023): RMSNorm, rotary grouped-query attention, SwiGLU.

Each function computes one unit from its weights by role and knows nothing of ranks beyond `tp.enter` and `tp.leave`.
Inside a unit weights are used as they come: a cast or copy of one would be kept by autograd after the weight was
given up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from trigrid.blueprint import Unit
from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.units import Microbatch, UnitFunction
from trigrid.models.attention import Attention, DocumentMasks, causal_attention
from trigrid.models.rope import Rope, rotate
from trigrid.spec.model import ModelSpec


class Decoder:
    """Gives each unit of a decoder its function."""

    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        attention: Attention = causal_attention,
    ):
        self._spec = spec
        self._tp = tp
        self._rope = Rope(spec, dtype, device)
        self._attention = attention
        self._masks = DocumentMasks()

    def function(self, unit: Unit, locals_: Mapping[str, LocalParameter]) -> UnitFunction:
        if unit.kind == "embedding":
            return lambda w, x, mb: self._tp.embed(mb.tokens_SB, w["embedding"], locals_["embedding"])
        if unit.kind == "llama":
            return self._block
        assert unit.kind == "head", f"the engine has no unit of kind {unit.kind}"
        return lambda w, x, mb: self._head(w, x, mb, locals_["head"])

    def _block(self, w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch) -> Tensor:
        x_SBH = x_SBH + self._attend(w, self._norm(x_SBH, w["attention_norm"]), self._masks.of(microbatch))
        return x_SBH + self._feed_forward(w, self._norm(x_SBH, w["ffn_norm"]))

    def _attend(self, w: Mapping[str, Tensor], x_SBH: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        x_SBH = self._tp.enter(x_SBH)
        heads = (*x_SBH.shape[:2], -1, self._spec.head_dim)
        q_SBND = F.linear(x_SBH, w["q"], w.get("q_bias")).view(heads)
        k_SBMD = F.linear(x_SBH, w["k"], w.get("k_bias")).view(heads)
        v_SBMD = F.linear(x_SBH, w["v"], w.get("v_bias")).view(heads)
        if self._spec.qk_norm:
            q_SBND, k_SBMD = self._norm(q_SBND, w["q_norm"]), self._norm(k_SBMD, w["k_norm"])
        cos, sin = self._rope.tables(x_SBH.shape[0])
        q_SBND, k_SBMD = rotate(q_SBND, cos, sin), rotate(k_SBMD, cos, sin)
        q_BNSD, k_BMSD, v_BMSD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_SBMD, v_SBMD))
        o_BNSD = self._attention(q_BNSD, k_BMSD, v_BMSD, mask_B1SS)
        o_SBH = o_BNSD.permute(2, 0, 1, 3).flatten(2)
        return self._tp.leave(F.linear(o_SBH, w["o"]))

    def _feed_forward(self, w: Mapping[str, Tensor], x_SBH: Tensor) -> Tensor:
        x_SBH = self._tp.enter(x_SBH)
        gated_SBF = F.silu(F.linear(x_SBH, w["gate"])) * F.linear(x_SBH, w["up"])
        return self._tp.leave(F.linear(gated_SBF, w["down"]))

    def _head(self, w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch, local: LocalParameter) -> Tensor:
        x_SBH = self._tp.enter(self._norm(x_SBH, w["final_norm"]))
        logits_SBV = F.linear(x_SBH, w["head"])
        return self._tp.cross_entropy(logits_SBV, microbatch.labels_SB, microbatch.scale, local)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._spec.norm_eps)
