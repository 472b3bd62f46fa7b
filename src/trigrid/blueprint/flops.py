"""Floating-point operations of a training step, counted from shapes."""

from __future__ import annotations

from trigrid.spec.model import ModelSpec


def forward_flops_per_token(spec: ModelSpec, sequence: int, *, causal: bool) -> float:
    """Multiply-adds × 2 of all matrix products for one token; the embedding look-up costs none.

    causal = True counts the half of the attention scores that a causal mask leaves (Megatron-Bridge's convention),
    False counts all of them (torchtitan's, PaLM appendix B).
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    ffn_matrices = 3 if spec.block == "llama" else 2
    block = spec.hidden * (2 * queries + 2 * keys + ffn_matrices * spec.ffn)
    scores = 2 * queries * sequence * (0.5 if causal else 1.0)
    return 2.0 * (spec.layers * (block + scores) + spec.hidden * spec.vocab)


def train_flops_per_token(spec: ModelSpec, sequence: int, *, causal: bool) -> float:
    """Model FLOPs of forward and backward (twice the forward) for one token, without recomputation."""
    return 3.0 * forward_flops_per_token(spec, sequence, causal=causal)
