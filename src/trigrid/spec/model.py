"""The shape of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3's stretching of the rotary frequencies (Llama 3 herd of models, section 3.4.2).

    Wavelengths longer than `original_context / low_freq_factor` are multiplied by `factor`, those shorter than
    `original_context / high_freq_factor` kept, those between interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    `block = "llama"`: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Llama, Mistral, Qwen).
    `block = "gpt"`: LayerNorm, learned positions, biases everywhere, GELU (GPT-3); known to the planner only so far.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    block: Literal["llama", "gpt"] = "llama"
    tied: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
