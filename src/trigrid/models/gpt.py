"""A block of GPT-2 and GPT-3 (Radford 2019, Brown 2020): LayerNorm, biases everywhere, GELU."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from trigrid.models.block import Block, column_layers, row_layer


class GptBlock(Block):
    def _place(
        self, w: Mapping[str, Tensor], qkv_SBED: Tensor, heads: tuple[int, int, int], selective: bool
    ) -> tuple[Tensor, ...]:
        return qkv_SBED.split_with_sizes(heads, 2)

    def _feed_forward(self, w: Mapping[str, Tensor], x_SBH: Tensor, selective: bool) -> Tensor:
        normed = self._norm.inputs(w, "ffn_norm", x_SBH)
        up = self._tp.column(self._norm, normed, column_layers(w, "up"), again=selective)
        return self._tp.row(gelu, [up], row_layer(w, "down"), again=selective) + w["down_bias"]


def gelu(up_SBF: Tensor) -> Tensor:
    """Its approximation by tanh (Hendrycks and Gimpel 2016), as there."""
    return F.gelu(up_SBF, approximate="tanh")
