"""A decoder: embedding, blocks of one kind, head.

Each function computes one unit from its weights by role and knows nothing of ranks beyond `tp`. Inside a unit weights
are used as they come: a cast or copy of one would be kept by autograd after the weight was given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trigrid.blueprint import Unit
from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.dropout import Dropout
from trigrid.engine.loss import head_loss
from trigrid.engine.tensor import Layer, TensorParallel
from trigrid.engine.units import Microbatch, UnitFunction
from trigrid.models.attention import Attention, causal_attention
from trigrid.models.block import Block, Ways, row_layer
from trigrid.models.compiled import CompiledBlock
from trigrid.models.gpt import GptBlock
from trigrid.models.llama import LlamaBlock
from trigrid.models.norms import Norm
from trigrid.spec.layout import RecomputeName
from trigrid.spec.model import ModelSpec


@dataclass(frozen=True)
class Rates:
    """Dropout of a model: of what the embedding and each half of a block give, and of the attention's probabilities;
    seed: of its masks."""

    hidden: float = 0.0
    attention: float = 0.0
    seed: int = 0


class Decoder:
    """Gives each unit of a decoder its function. traced: what blocks that are compiled take in place of `tp`."""

    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        loss_chunks: int = 1,
        attention: Attention = causal_attention,
        dropout: Rates = Rates(),
        traced: TensorParallel | None = None,
    ):
        self._tp = tp
        self._loss_chunks = loss_chunks
        self._norm = Norm(spec)
        self._kind = spec.block
        self._dropout, self._device = dropout, device
        self._block: Block = (
            GptBlock(spec, traced or tp, attention)
            if spec.block == "gpt"
            else LlamaBlock(spec, traced or tp, dtype, device, attention)
        )
        self._compiled = CompiledBlock(self._block, tp.regather) if traced else None

    def function(
        self, unit: Unit, locals_: Mapping[str, LocalParameter], recompute: RecomputeName = "none"
    ) -> UnitFunction:
        def dropout(site: str, rate: float) -> Dropout:
            return Dropout(rate, self._dropout.seed, unit.name, site, self._device)

        hidden = self._dropout.hidden
        if unit.kind == "embedding":
            after = dropout("embedding", hidden)
            return lambda w, x, mb: self._embed(w, mb, locals_["embedding"], after)
        if unit.kind == "head":
            return lambda w, x, mb: self._head(w, x, mb, locals_["head"])
        assert unit.kind == self._kind, f"the engine has no unit of kind {unit.kind}"
        ways = Ways(
            attention=dropout("attention", hidden),
            ffn=dropout("ffn", hidden),
            scores=dropout("scores", self._dropout.attention),
            selective=recompute == "selective",
        )
        return self._compiled.function(ways) if self._compiled else partial(self._block, ways=ways)

    def _embed(
        self, w: Mapping[str, Tensor], microbatch: Microbatch, local: LocalParameter, dropout: Dropout
    ) -> Tensor:
        x_SBH = self._tp.embed(microbatch.tokens_SB, w["embedding"], local)
        here = self._tp.own_sequence(microbatch.tokens_SB.shape[0])
        if "positions" in w:
            x_SBH = x_SBH + w["positions"][here].unsqueeze(1)
        return dropout.hidden(x_SBH, microbatch, here.start)

    def logits(self, w: Mapping[str, Tensor], x_SBH: Tensor) -> Tensor:
        """What the head, by the weights of its unit, says of the next tokens; of its own columns where TP cuts it."""
        (logits_SBV,) = self._tp.products(self._final(w, x_SBH), row_layer(w, "head"))
        return logits_SBV

    def _head(self, w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch, local: LocalParameter) -> Tensor:
        labels_SB, scale = microbatch.labels_SB, microbatch.scale
        # In pieces its gradient is added up before it goes to its bucket.
        head = next(row_layer(w, "head")) if self._loss_chunks == 1 else Layer(w["head"])
        return head_loss(self._final(w, x_SBH), head, labels_SB, scale, local, self._tp, self._loss_chunks)

    def _final(self, w: Mapping[str, Tensor], x_SBH: Tensor) -> Tensor:
        return self._tp.enter(self._norm(*self._norm.inputs(w, "final_norm", x_SBH)))
