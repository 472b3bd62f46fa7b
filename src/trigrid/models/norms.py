"""Norms by the role of their weight: RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba 2016)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from trigrid.spec.model import ModelSpec

Norm = Callable[[Mapping[str, Tensor], str, Tensor], Tensor]
"""(weights by role, the norm's role, x) → x with its last dimension normed."""


def norm_of(spec: ModelSpec) -> Norm:
    """The norm that the blocks and the head of `spec` use."""
    eps = spec.norm_eps

    def rms(w: Mapping[str, Tensor], role: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, w[role].shape, w[role], eps)

    def layer(w: Mapping[str, Tensor], role: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, w[role].shape, w[role], w[f"{role}_bias"], eps)

    return layer if spec.block == "gpt" else rms
