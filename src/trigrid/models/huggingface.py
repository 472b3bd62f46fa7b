"""Where transformers' Llama, Mistral, Qwen2, Qwen3 and GPT-2 keep each parameter of a model of trigrid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trigrid.blueprint import decoder
from trigrid.blueprint.parameters import Box, Parameter
from trigrid.spec.model import ModelSpec
from trigrid.spec.to_huggingface import architecture_of

_LLAMA_OUTER = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_LLAMA_INNER = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GPT2_OUTER = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT2_INNER = {
    "attention_norm": "ln_1",
    "q": "attn.c_attn",
    "k": "attn.c_attn",
    "v": "attn.c_attn",
    "o": "attn.c_proj",
    "ffn_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Place:
    """A parameter as `box` of the tensor called `tensor`, which as a whole has `shape`; transposed: a matrix that lies
    there the other way round."""

    tensor: str
    shape: tuple[int, ...]
    box: Box
    transposed: bool = False


def places(spec: ModelSpec) -> dict[str, Place]:
    """The place of each parameter of `decoder(spec)`, by trigrid's name; together they fill their tensors.

    Raises Refused where transformers has no such model.
    """
    of = _in_gpt2 if architecture_of(spec) == "gpt2" else _in_llama
    return {name: of(parameter) for name, parameter in decoder(spec).parameters.items()}


def tensors(spec: ModelSpec) -> dict[str, dict[str, Place]]:
    """The same from the other side: by the name of the tensor, the parameters in it with their places.

    A tied model has no tensor for its head."""
    found: dict[str, dict[str, Place]] = {}
    for name, place in places(spec).items():
        found.setdefault(place.tensor, {})[name] = place
    return found


def known_as(found: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    """The names of `found`, those in a file, by the names that `tensors` uses.

    A file of the bare decoder lacks the first word of its names. Left out is what is no parameter: masks and
    frequencies, which older files hold.
    """
    first = "transformer." if spec.block == "gpt" else "model."
    return {
        name if name.startswith((first, "lm_head.")) else first + name: name
        for name in found
        if not name.endswith(_BUFFERS)
    }


def turned(box: Box, place: Place) -> Box:
    """`box` of a parameter, in the tensor of its `place`; its dimensions may change their order."""
    ordered = box[::-1] if place.transposed else box
    return tuple((at + start, at + stop) for (start, stop), (at, _) in zip(ordered, place.box, strict=True))


def turned_back(box: Box, place: Place) -> Box | None:
    """What of a parameter lies in `box` of the tensor of its `place`; None where nothing does."""
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, place.box, strict=True)]
    if any(start >= stop for start, stop in common):
        return None
    inside = tuple((a - at, b - at) for (a, b), (at, _) in zip(common, place.box, strict=True))
    return inside[::-1] if place.transposed else inside


def _in_llama(parameter: Parameter) -> Place:
    return _whole(parameter, _translated(parameter.name, _LLAMA_OUTER, _LLAMA_INNER, "model.layers"), False)


def _in_gpt2(parameter: Parameter) -> Place:
    """GPT-2 keeps a block's matrices the other way round, and queries, keys and values in one."""
    name = _translated(parameter.name, _GPT2_OUTER, _GPT2_INNER, "transformer.h")
    transposed = parameter.name.startswith("layers.") and len(parameter.shape) == 2
    role = parameter.name.split(".")[-2]
    if role not in ("q", "k", "v"):
        return _whole(parameter, name, transposed)
    outputs = parameter.shape[0]
    at = "qkv".index(role) * outputs
    *inputs, _ = _ordered(parameter.shape, transposed)
    box = (*((0, n) for n in inputs), (at, at + outputs))
    return Place(name, (*inputs, 3 * outputs), box, transposed)


def _whole(parameter: Parameter, name: str, transposed: bool) -> Place:
    shape = _ordered(parameter.shape, transposed)
    return Place(name, shape, tuple((0, n) for n in shape), transposed)


def _ordered(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    return shape[::-1] if transposed else shape


def _translated(name: str, outer: dict[str, str], inner: dict[str, str], layers: str) -> str:
    """`layers.3.up.weight` → `model.layers.3.mlp.up_proj.weight`."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{outer[module]}.{kind}"
    _, layer, role = module.split(".")
    return f"{layers}.{layer}.{inner[role]}.{kind}"
