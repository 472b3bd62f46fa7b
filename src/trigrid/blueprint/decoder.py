"""The units of a decoder (embedding, blocks, head) and the parameters of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Literal

from trigrid.blueprint.parameters import Parameter
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

INIT_STD = 0.02


@dataclass(frozen=True)
class Unit:
    """A piece of the model that is gathered, recomputed and reduced as one. `parameters` in the order the code uses
    them."""

    name: str
    kind: Literal["embedding", "llama", "gpt", "head"]
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
        split = layout.stage_layers or split_layers(self.spec.layers, layout.pp)
        start = sum(split[:stage]) + (stage > 0)
        stop = 1 + sum(split[: stage + 1]) + (stage == layout.pp - 1)
        return self.units[start:stop]


def split_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, as even as they go.

    What is left over goes to the stages before the last, from the back: the first and the last stage also hold the
    embedding and the head, and an early stage keeps more microbatches in flight.
    """
    base, left = divmod(layers, pp)
    return tuple(base + (pp - 1 - left <= stage < pp - 1) for stage in range(pp))


def decoder(spec: ModelSpec) -> Blueprint:
    """The blueprint of `spec`."""
    blocks = {"llama": _llama_block, "gpt": _gpt_block}
    units = (
        _embedding(spec),
        *(Unit(f"layers.{i}", spec.block, blocks[spec.block](spec, f"layers.{i}.")) for i in range(spec.layers)),
        _head(spec),
    )
    return Blueprint(spec, units)


def _matrix(name: str, role: str, out: int, into: int, cut: int, pieces: int, std: float = INIT_STD) -> Parameter:
    return Parameter(name=f"{name}{role}.weight", role=role, shape=(out, into), cut=cut, pieces=pieces, std=std)


def _bias(name: str, role: str, size: int, cut: int | None, pieces: int) -> Parameter:
    return Parameter(name=f"{name}{role}.bias", role=f"{role}_bias", shape=(size,), cut=cut, pieces=pieces, decay=False)


def _norm(name: str, role: str, size: int, partial: Literal["always", "sequence"] = "sequence") -> Parameter:
    return Parameter(name=f"{name}{role}.weight", role=role, shape=(size,), partial=partial, decay=False, fill=1.0)


def _llama_block(spec: ModelSpec, at: str) -> tuple[Parameter, ...]:
    h, queries, keys = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    residual_std = INIT_STD / sqrt(2 * spec.layers)
    parameters = [
        _norm(at, "attention_norm", h),
        _matrix(at, "q", queries, h, 0, spec.heads),
        _matrix(at, "k", keys, h, 0, spec.kv_heads),
        _matrix(at, "v", keys, h, 0, spec.kv_heads),
        _matrix(at, "o", h, queries, 1, spec.heads, residual_std),
        _norm(at, "ffn_norm", h),
        _matrix(at, "gate", spec.ffn, h, 0, spec.ffn),
        _matrix(at, "up", spec.ffn, h, 0, spec.ffn),
        _matrix(at, "down", h, spec.ffn, 1, spec.ffn, residual_std),
    ]
    if spec.qkv_bias:
        parameters += [
            _bias(at, "q", queries, 0, spec.heads),
            _bias(at, "k", keys, 0, spec.kv_heads),
            _bias(at, "v", keys, 0, spec.kv_heads),
        ]
    if spec.qk_norm:
        # One weight for all heads, of which each TP rank sees only its own.
        parameters += [_norm(at, "q_norm", spec.head_dim, "always"), _norm(at, "k_norm", spec.head_dim, "always")]
    return tuple(parameters)


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
