"""Rotary positions (Su 2021), with Llama-3's frequency scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trigrid.spec.model import ModelSpec, RopeScaling


class Rope:
    """Tables of cosines and sines, made once for the longest sequence seen.

    Angles are computed in fp64: in fp32 they lose a digit every ten-fold of the position.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device):
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64, device=device) / spec.head_dim
        self._frequencies = spec.rope_theta**-exponents
        if spec.rope_scaling is not None:
            self._frequencies = _scaled(self._frequencies, spec.rope_scaling)
        self._dtype = dtype
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, sequence: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each [sequence, 1, 1, head_dim]."""
        if self._tables is None or self._tables[0].shape[0] < sequence:
            positions = torch.arange(sequence, dtype=torch.float64, device=self._frequencies.device)
            angles = torch.outer(positions, self._frequencies).repeat(1, 2)[:, None, None]
            self._tables = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        cos, sin = self._tables
        return cos[:sequence], sin[:sequence]


def rotate(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) of the last dimension by its position's angle."""
    first, second = x_SBND.chunk(2, dim=-1)
    return x_SBND * cos + torch.cat((-second, first), dim=-1) * sin


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = smooth.clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)
