"""The shape of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3's stretching of the rotary frequencies (Llama 3 herd of models, section 3.4.2).

    Long wavelengths are multiplied by `factor`, short ones kept, those between interpolated.
    """

    factor: float
    """How many times longer the longest wavelengths become."""
    low_freq_factor: float = 1.0
    """Wavelengths above original_context ÷ low_freq_factor tokens are stretched in full."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_context ÷ high_freq_factor tokens stay as they are."""
    original_context: int = 8192
    """Longest sequence of the model before the stretching, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer: a router sends each token to the best few of them."""

    count: int
    """Routed experts of a block."""
    top_k: int
    """Routed experts that each token goes to."""
    ffn: int
    """Inner width of a routed expert, in elements."""
    shared_ffn: int = 0
    """Inner width of what every token passes as well, all shared experts together; 0: there is none."""
    dense_layers: int = 0
    """First blocks that have a plain feed-forward layer of width ffn instead."""
    correction_bias: bool = False
    """A number per expert that is added when experts are chosen, as in DeepSeek-V3."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads come from a narrow vector.

    In its place in a model, head_dim is nope_dim + rope_dim and kv_heads equals heads.
    """

    kv_rank: int
    """Width of the vector that keys and values come from, in elements."""
    nope_dim: int
    """Elements of a query or key head without positions."""
    rope_dim: int
    """Elements of a query or key head with rotary positions, which all heads of the keys share."""
    v_dim: int
    """Elements of a value head."""
    q_rank: int = 0
    """Width of the vector that queries come from; 0: they come from the residual stream itself."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer."""

    name: str
    """A model of the catalogue, which fills in the whole shape, or a name of your own for a shape of your own."""
    hidden: int
    """Width of the residual stream, in elements."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Query heads of a block."""
    kv_heads: int
    """Key and value heads of a block: a divisor of heads, fewer of them for grouped-query attention."""
    head_dim: int
    """Width of a head, in elements."""
    ffn: int
    """Inner width of the feed-forward layer, in elements."""
    vocab: int
    """Entries of the vocabulary."""
    context: int
    """Longest sequence, in tokens."""
    block: Literal["llama", "gpt"] = "llama"
    """"llama": RMSNorm, rotary positions, SwiGLU (Llama, Mistral, Qwen); "gpt": LayerNorm, learned positions, GELU and
    biases everywhere (GPT-2, GPT-3)."""
    tied: bool = False
    """One weight for the embedding and the head."""
    norm_eps: float = 1e-5
    """Added to the mean square, or to the variance, under the root of a norm."""
    rope_theta: float = 10_000.0
    """Base of the rotary positions' wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama-3's stretching of the rotary positions' wavelengths; left out: none."""
    qkv_bias: bool = False
    """Biases on query, key and value, as in Qwen2."""
    qk_norm: bool = False
    """RMSNorm on the queries and keys of each head, as in Qwen3."""
    experts: Experts | None = None
    """A mixture of experts (Mixtral, DeepSeek, Qwen3-MoE), known to the planner only so far; left out: none."""
    latent: LatentAttention | None = None
    """Multi-head latent attention (DeepSeek), known to the planner only so far; left out: none."""
