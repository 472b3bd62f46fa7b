"""What all decoder blocks have in common: attention and a feed-forward, each behind a norm and added to its input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from trigrid.engine.again import unkept
from trigrid.engine.dropout import Dropout
from trigrid.engine.tensor import Layer, TensorParallel
from trigrid.engine.units import Microbatch, Weights
from trigrid.models.attention import Attention, DocumentMasks, Drop
from trigrid.models.norms import Norm
from trigrid.spec.model import ModelSpec


@dataclass(frozen=True)
class Ways:
    """How one block runs. attention, ffn: dropout of what either adds; scores: of the attention's probabilities.

    selective: what is cheap for its size is not kept for backward but made again.
    """

    attention: Dropout
    ffn: Dropout
    scores: Dropout
    selective: bool


class Block(ABC):
    """The function of every block of a model.

    A bias behind a sum over TP is added once, after it.
    """

    def __init__(self, spec: ModelSpec, tp: TensorParallel, attention: Attention):
        self._tp = tp
        self._heads, self._head_dim = spec.heads // tp.size, spec.head_dim
        self._attention = attention
        self._masks = DocumentMasks()
        self._norm = Norm(spec)

    def __call__(self, w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch, ways: Ways) -> Tensor:
        return self.compute(w, x_SBH, microbatch, self.prepare(microbatch, x_SBH.dtype), ways)

    def prepare(self, microbatch: Microbatch, dtype: torch.dtype) -> Tensor | None:
        """What all blocks share of a microbatch is made, where it is not there yet; returns its mask_B1SS."""
        return self._masks.of(microbatch, dtype)

    def compute(
        self, w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch, mask_B1SS: Tensor | None, ways: Ways
    ) -> Tensor:
        """The block itself, after `prepare`: tensors in, a tensor out, and nothing kept beside."""
        first = self._tp.own_sequence(microbatch.tokens_SB.shape[0]).start
        x_SBH = x_SBH + ways.attention.hidden(self._attend(w, x_SBH, microbatch, mask_B1SS, ways), microbatch, first)
        return x_SBH + ways.ffn.hidden(self._feed_forward(w, x_SBH, ways.selective), microbatch, first)

    def _attend(
        self, w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch, mask_B1SS: Tensor | None, ways: Ways
    ) -> Tensor:
        q_SBND, k_SBMD, v_SBMD = self._queries_keys_values(w, x_SBH, ways.selective)
        q_BNSD, k_BMSD, v_BMSD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_SBMD, v_SBMD))
        drop = self._drop(ways.scores, microbatch, q_BNSD)
        with unkept(q_SBND, k_SBMD) if ways.selective else nullcontext():
            o_BNSD = self._attention(q_BNSD, k_BMSD, v_BMSD, mask_B1SS, drop, ways.selective)
        y_SBH = self._tp.leave(*self._tp.products(o_BNSD.permute(2, 0, 1, 3).flatten(2), row_layer(w, "o")))
        return y_SBH + w["o_bias"] if "o_bias" in w else y_SBH

    def _queries_keys_values(self, w: Mapping[str, Tensor], x_SBH: Tensor, selective: bool) -> tuple[Tensor, ...]:
        normed = self._norm.inputs(w, "attention_norm", x_SBH)
        qkv_SBE = self._tp.column(self._norm, normed, column_layers(w, *"qkv"), again=selective)
        qkv_SBED = qkv_SBE.view(*qkv_SBE.shape[:2], -1, self._head_dim)
        kv_heads = (qkv_SBED.shape[2] - self._heads) // 2
        return self._place(w, qkv_SBED, (self._heads, kv_heads, kv_heads), selective)

    def _drop(self, dropout: Dropout, microbatch: Microbatch, q_BNSD: Tensor) -> Drop | None:
        if not dropout.draws(microbatch):
            return None
        _, heads, queries, _ = q_BNSD.shape
        first = self._tp.index * heads
        return Drop(lambda: dropout.rows(microbatch, range(first, first + heads), queries), dropout.rate)

    @abstractmethod
    def _place(
        self, w: Mapping[str, Tensor], qkv_SBED: Tensor, heads: tuple[int, int, int], selective: bool
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values, of which there are so many `heads`; the first two with their places in them, where
        the block puts them there."""

    @abstractmethod
    def _feed_forward(self, w: Mapping[str, Tensor], x_SBH: Tensor, selective: bool) -> Tensor:
        """From the block's middle to what is added to it, the norm included."""


def column_layers(w: Mapping[str, Tensor], *roles: str) -> Iterator[Layer]:
    """Each of `roles`, or all as one, with its bias, asked for when its product is."""
    if (together := "+".join(roles)) in w:
        yield _layer(w, together, "+".join(f"{role}_bias" for role in roles))
    else:
        yield from (_layer(w, role, f"{role}_bias") for role in roles)


def row_layer(w: Mapping[str, Tensor], role: str) -> Iterator[Layer]:
    """The same of a layer whose bias, if there is one, is added after a sum."""
    yield _layer(w, role)


def _layer(w: Mapping[str, Tensor], role: str, bias: str = "") -> Layer:
    # A graph of the compiler has weights alone.
    weight, sink = w.factor(role) if isinstance(w, Weights) else (w[role], None)
    return Layer(weight, w.get(bias), sink)
