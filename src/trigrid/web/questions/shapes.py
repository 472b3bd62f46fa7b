"""A model's shape for people."""

from __future__ import annotations

from dataclasses import dataclass

from trigrid.blueprint.decoder import parameter_count
from trigrid.report.units import scaled
from trigrid.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder by its numbers."""

    name: str
    """Of the model."""
    parameters: int
    """Logical parameters, tied ones once."""
    hidden: int
    """Width of the residual stream."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    ffn: int
    """Inner width of the feed-forward layer."""
    vocab: int
    """Entries of the vocabulary."""
    context: int
    """Longest sequence, in tokens."""
    tied: bool
    """One weight for embedding and head."""
    experts: int
    """Routed experts of a block; 0: it is dense."""
    words: str
    """The same in a sentence."""


def shape(spec: ModelSpec) -> Shape:
    """The shape of `spec`."""
    count = parameter_count(spec)
    experts = spec.experts.count if spec.experts else 0
    words = (
        f"{scaled(count)} parameters: {spec.layers} layers of width {spec.hidden:,}, {spec.heads} heads of "
        f"{spec.head_dim} with {spec.kv_heads} KV heads, FFN {spec.ffn:,}, vocabulary {spec.vocab:,}, context "
        f"{spec.context:,}"
    )
    if spec.experts:
        words += f", {spec.experts.top_k} of {experts} experts of width {spec.experts.ffn:,}"
    return Shape(
        name=spec.name,
        parameters=count,
        hidden=spec.hidden,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        vocab=spec.vocab,
        context=spec.context,
        tied=spec.tied,
        experts=experts,
        words=words,
    )
