"""The units of a decoder (embedding, blocks, head) and the parameters of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Literal

from trigrid.blueprint.parameters import Parameter
from trigrid.spec.layout import Layout
from trigrid.spec.model import LatentAttention, ModelSpec

INIT_STD = 0.02
TOGETHER = (("q", "k", "v"), ("gate", "up"))
"""Roles of weights that multiply the same input, which one product can do where they lie one after the other."""


BlockKind = Literal["llama", "gpt", "moe"]


@dataclass(frozen=True)
class Unit:
    """A piece of the model that is gathered, recomputed and reduced as one. `parameters` in the order the code uses
    them."""

    name: str
    kind: Literal["embedding", "llama", "gpt", "moe", "head"]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Blueprint:
    """The units of a model in order, from the embedding to the head. A tied weight appears in two units under one
    name."""

    spec: ModelSpec
    units: tuple[Unit, ...]

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        return {p.name: p for unit in self.units for p in unit.parameters}

    @property
    def count(self) -> int:
        """Logical parameters of the model, tied ones once, padding not counted."""
        return sum(p.numel for p in self.parameters.values())

    def stage(self, layout: Layout, stage: int) -> tuple[Unit, ...]:
        """Units of pipeline stage `stage`: the first holds the embedding, the last the head."""
        split = layout.stage_layers or split_layers(self.spec.layers, layout.stages)
        start = sum(split[:stage]) + (stage > 0)
        stop = 1 + sum(split[: stage + 1]) + (stage == layout.stages - 1)
        return self.units[start:stop]


def split_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, as even as they go.

    What is left over goes to the stages before the last, from the back: the first and the last stage also hold the
    embedding and the head, and an early stage keeps more microbatches in flight.
    """
    base, left = divmod(layers, pp)
    return tuple(base + (pp - 1 - left <= stage < pp - 1) for stage in range(pp))


def block_kinds(spec: ModelSpec) -> tuple[tuple[BlockKind, int], ...]:
    """(kind, number of blocks), in the order of the layers."""
    if spec.experts is None:
        return ((spec.block, spec.layers),)
    dense = spec.experts.dense_layers
    return ((spec.block, dense), ("moe", spec.layers - dense)) if dense else (("moe", spec.layers),)


def decoder_units(spec: ModelSpec) -> tuple[Unit, ...]:
    """One unit of each kind of `spec`: the embedding, its blocks' kinds, the head."""
    return (_embedding(spec), *(_block(spec, kind, 0) for kind, _ in block_kinds(spec)), _head(spec))


def parameter_count(spec: ModelSpec) -> int:
    """What `decoder(spec).count` is, from one block of each kind."""
    counts: dict[str, int] = {"embedding": 1, "head": 1}
    counts.update(block_kinds(spec))
    seen: dict[str, int] = {}
    for unit in decoder_units(spec):
        seen |= {p.name if p.tied else f"{unit.kind}.{p.name}": p.numel * counts[unit.kind] for p in unit.parameters}
    return sum(seen.values())


def decoder(spec: ModelSpec) -> Blueprint:
    """The blueprint of `spec`."""
    kinds = [kind for kind, count in block_kinds(spec) for _ in range(count)]
    return Blueprint(spec, (_embedding(spec), *(_block(spec, kind, i) for i, kind in enumerate(kinds)), _head(spec)))


def _block(spec: ModelSpec, kind: BlockKind, index: int) -> Unit:
    blocks = {"llama": _llama_block, "gpt": _gpt_block, "moe": _moe_block}
    return Unit(f"layers.{index}", kind, blocks[kind](spec, f"layers.{index}."))


def _matrix(name: str, role: str, out: int, into: int, cut: int, pieces: int, std: float = INIT_STD) -> Parameter:
    return Parameter(name=f"{name}{role}.weight", role=role, shape=(out, into), cut=cut, pieces=pieces, std=std)


def _bias(name: str, role: str, size: int, cut: int | None, pieces: int) -> Parameter:
    return Parameter(name=f"{name}{role}.bias", role=f"{role}_bias", shape=(size,), cut=cut, pieces=pieces, decay=False)


def _norm(name: str, role: str, size: int, partial: Literal["always", "sequence"] = "sequence") -> Parameter:
    return Parameter(name=f"{name}{role}.weight", role=role, shape=(size,), partial=partial, decay=False, fill=1.0)


def _llama_block(spec: ModelSpec, at: str) -> tuple[Parameter, ...]:
    attention, extra = _attention(spec, at)
    return (*attention, _norm(at, "ffn_norm", spec.hidden), *_gated(spec, at, "", spec.ffn), *extra)


def _moe_block(spec: ModelSpec, at: str) -> tuple[Parameter, ...]:
    """A router, routed experts and, where there are any, shared ones. Known to the planner only so far."""
    assert spec.experts is not None
    experts, h = spec.experts, spec.hidden
    attention, extra = _attention(spec, at)
    routed = (
        Parameter(name=f"{at}expert_{role}.weight", role=f"expert_{role}", shape=shape, cut=1 + dim, std=INIT_STD)
        for role, shape, dim in (
            ("gate", (experts.count, experts.ffn, h), 0),
            ("up", (experts.count, experts.ffn, h), 0),
            ("down", (experts.count, h, experts.ffn), 1),
        )
    )
    router = [Parameter(name=f"{at}router.weight", role="router", shape=(experts.count, h), std=INIT_STD)]
    if experts.correction_bias:
        router.append(Parameter(name=f"{at}router.bias", role="router_bias", shape=(experts.count,), decay=False))
    shared = _gated(spec, at, "shared_", experts.shared_ffn) if experts.shared_ffn else ()
    return (*attention, _norm(at, "ffn_norm", h), *router, *routed, *shared, *extra)


def _gated(spec: ModelSpec, at: str, prefix: str, width: int) -> tuple[Parameter, ...]:
    residual_std = INIT_STD / sqrt(2 * spec.layers)
    return (
        _matrix(at, f"{prefix}gate", width, spec.hidden, 0, width),
        _matrix(at, f"{prefix}up", width, spec.hidden, 0, width),
        _matrix(at, f"{prefix}down", spec.hidden, width, 1, width, residual_std),
    )


def _latent_attention(spec: ModelSpec, latent: LatentAttention, at: str) -> list[Parameter]:
    """DeepSeek-V2, section 2.1: what is narrow is the same for all heads, so no TP rank cuts it."""
    h, heads = spec.hidden, spec.heads
    residual_std = INIT_STD / sqrt(2 * spec.layers)
    wide = latent.nope_dim + latent.rope_dim

    def narrow(role: str, out: int) -> Parameter:
        return Parameter(name=f"{at}{role}.weight", role=role, shape=(out, h), partial="always", std=INIT_STD)

    if latent.q_rank:
        queries = [
            narrow("q_down", latent.q_rank),
            _norm(at, "q_norm", latent.q_rank, "always"),
            _matrix(at, "q_up", heads * wide, latent.q_rank, 0, heads),
        ]
    else:
        queries = [_matrix(at, "q", heads * wide, h, 0, heads)]
    return [
        *queries,
        narrow("kv_down", latent.kv_rank + latent.rope_dim),
        _norm(at, "kv_norm", latent.kv_rank, "always"),
        _matrix(at, "kv_up", heads * (latent.nope_dim + latent.v_dim), latent.kv_rank, 0, heads),
        _matrix(at, "o", h, heads * latent.v_dim, 1, heads, residual_std),
    ]


def _attention(spec: ModelSpec, at: str) -> tuple[list[Parameter], list[Parameter]]:
    """Attention's parameters, and those that stand at the end of a block: biases and norms of heads."""
    h, queries, keys = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    residual_std = INIT_STD / sqrt(2 * spec.layers)
    if spec.latent:
        return [_norm(at, "attention_norm", h), *_latent_attention(spec, spec.latent, at)], []
    first = [
        _norm(at, "attention_norm", h),
        _matrix(at, "q", queries, h, 0, spec.heads),
        _matrix(at, "k", keys, h, 0, spec.kv_heads),
        _matrix(at, "v", keys, h, 0, spec.kv_heads),
        _matrix(at, "o", h, queries, 1, spec.heads, residual_std),
    ]
    parameters: list[Parameter] = []
    if spec.qkv_bias:
        parameters += [
            _bias(at, "q", queries, 0, spec.heads),
            _bias(at, "k", keys, 0, spec.kv_heads),
            _bias(at, "v", keys, 0, spec.kv_heads),
        ]
    if spec.qk_norm:
        # One weight for all heads, of which each TP rank sees only its own.
        parameters += [_norm(at, "q_norm", spec.head_dim, "always"), _norm(at, "k_norm", spec.head_dim, "always")]
    return first, parameters


def _layer_norm(at: str, role: str, size: int) -> tuple[Parameter, ...]:
    return _norm(at, role, size), _bias(at, role, size, None, 0)


def _gpt_block(spec: ModelSpec, at: str) -> tuple[Parameter, ...]:
    h, queries = spec.hidden, spec.heads * spec.head_dim
    residual_std = INIT_STD / sqrt(2 * spec.layers)
    return (
        *_layer_norm(at, "attention_norm", h),
        *(_matrix(at, role, queries, h, 0, spec.heads) for role in "qkv"),
        *(_bias(at, role, queries, 0, spec.heads) for role in "qkv"),
        _matrix(at, "o", h, queries, 1, spec.heads, residual_std),
        _bias(at, "o", h, None, 0),
        *_layer_norm(at, "ffn_norm", h),
        _matrix(at, "up", spec.ffn, h, 0, spec.ffn),
        _bias(at, "up", spec.ffn, 0, spec.ffn),
        _matrix(at, "down", h, spec.ffn, 1, spec.ffn, residual_std),
        _bias(at, "down", h, None, 0),
    )


def _embedding(spec: ModelSpec) -> Unit:
    parameters = [_vocabulary("embedding.weight", "embedding", spec)]
    if spec.block == "gpt":
        parameters.append(
            Parameter(name="positions.weight", role="positions", shape=(spec.context, spec.hidden), std=INIT_STD)
        )
    return Unit("embedding", "embedding", tuple(parameters))


def _head(spec: ModelSpec) -> Unit:
    norm = (
        _layer_norm("", "final_norm", spec.hidden) if spec.block == "gpt" else (_norm("", "final_norm", spec.hidden),)
    )
    name = "embedding.weight" if spec.tied else "head.weight"
    return Unit("head", "head", (*norm, _vocabulary(name, "head", spec)))


def _vocabulary(name: str, role: str, spec: ModelSpec) -> Parameter:
    return Parameter(name=name, role=role, shape=(spec.vocab, spec.hidden), cut=0, std=INIT_STD, tied=spec.tied)
