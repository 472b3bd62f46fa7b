"""Floating-point operations of a training step, counted from shapes."""

from __future__ import annotations

from trigrid.spec.model import ModelSpec


def forward_flops_per_token(spec: ModelSpec, sequence: int, *, causal: bool) -> float:
    """Multiply-adds × 2 of all matrix products for one token; the embedding look-up costs none.

    causal = True counts the half of the attention scores that a causal mask leaves (Megatron-Bridge's convention),
    False counts all of them (torchtitan's, PaLM appendix B).
    """
    latent, experts = spec.latent, spec.experts
    values = latent.v_dim if latent else spec.head_dim
    scores = spec.heads * (spec.head_dim + values) * sequence * (0.5 if causal else 1.0)
    ffn_matrices = 3 if spec.block == "llama" else 2
    dense = ffn_matrices * spec.hidden * spec.ffn
    total = spec.layers * (_attention_products(spec) + scores) + spec.hidden * spec.vocab
    if experts is None:
        return 2.0 * (total + spec.layers * dense)
    mixed = spec.hidden * (experts.count + 3 * experts.top_k * experts.ffn + 3 * experts.shared_ffn)
    sparse = spec.layers - experts.dense_layers
    return 2.0 * (total + experts.dense_layers * dense + sparse * mixed)


def _attention_products(spec: ModelSpec) -> int:
    """Multiply-adds of attention's projections for one token."""
    h, heads, latent = spec.hidden, spec.heads, spec.latent
    if latent is None:
        return h * 2 * (heads + spec.kv_heads) * spec.head_dim
    wide = heads * (latent.nope_dim + latent.rope_dim)
    queries = latent.q_rank * (h + wide) if latent.q_rank else h * wide
    keys = h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * heads * (latent.nope_dim + latent.v_dim)
    return queries + keys + heads * latent.v_dim * h


def train_flops_per_token(spec: ModelSpec, sequence: int, *, causal: bool) -> float:
    """Model FLOPs of forward and backward (twice the forward) for one token, without recomputation."""
    return 3.0 * forward_flops_per_token(spec, sequence, causal=causal)
