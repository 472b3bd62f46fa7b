"""A decoder: embedding, blocks of one kind, head.

Each function computes one unit from its weights by role and knows nothing of ranks beyond `tp`. Inside a unit weights
are used as they come: a cast or copy of one would be kept by autograd after the weight was given up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trigrid.blueprint import Unit
from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.loss import head_loss
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.units import Microbatch, UnitFunction
from trigrid.models.attention import Attention, causal_attention
from trigrid.models.gpt import GptBlock
from trigrid.models.llama import LlamaBlock
from trigrid.models.norms import norm_of
from trigrid.spec.model import ModelSpec


class Decoder:
    """Gives each unit of a decoder its function."""

    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        loss_chunks: int = 1,
        attention: Attention = causal_attention,
    ):
        self._tp = tp
        self._loss_chunks = loss_chunks
        self._norm = norm_of(spec)
        self._kind = spec.block
        self._block: UnitFunction = (
            GptBlock(spec, tp, attention) if spec.block == "gpt" else LlamaBlock(spec, tp, dtype, device, attention)
        )

    def function(self, unit: Unit, locals_: Mapping[str, LocalParameter]) -> UnitFunction:
        if unit.kind == "embedding":
            return lambda w, x, mb: self._embed(w, mb, locals_["embedding"])
        if unit.kind == "head":
            return lambda w, x, mb: self._head(w, x, mb, locals_["head"])
        assert unit.kind == self._kind, f"the engine has no unit of kind {unit.kind}"
        return self._block

    def _embed(self, w: Mapping[str, Tensor], microbatch: Microbatch, local: LocalParameter) -> Tensor:
        x_SBH = self._tp.embed(microbatch.tokens_SB, w["embedding"], local)
        if "positions" in w:
            here = self._tp.own_sequence(microbatch.tokens_SB.shape[0])
            x_SBH = x_SBH + w["positions"][here].unsqueeze(1)
        return x_SBH

    def _head(self, w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch, local: LocalParameter) -> Tensor:
        x_SBH = self._tp.enter(self._norm(w, "final_norm", x_SBH))
        labels_SB, scale = microbatch.labels_SB, microbatch.scale
        return head_loss(x_SBH, w["head"], labels_SB, scale, local, self._tp.comm, self._loss_chunks)
