"""The parameters of transformers' Llama, Mistral, Qwen2, Qwen3 and GPT-2, under trigrid's names and in its shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

_OUTER = {"model.embed_tokens": "embedding", "model.norm": "final_norm", "lm_head": "head"}
_INNER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


def parameter_name(huggingface: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` → `layers.3.up.weight`; KeyError for a parameter of another architecture."""
    module, kind = huggingface.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"layers.{layer}.{_INNER[inner]}.{kind}"
    return f"{_OUTER[module]}.{kind}"


_GPT2 = {
    "transformer.wte": "embedding",
    "transformer.wpe": "positions",
    "transformer.ln_f": "final_norm",
    "lm_head": "head",
    "ln_1": "attention_norm",
    "attn.c_proj": "o",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def in_trigrid_terms(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Weights or gradients by trigrid's names, as copies."""
    return {
        ours: tensor.clone()
        for name, tensors in named
        for ours, tensor in (
            _of_gpt2(name, tensors) if name.startswith("transformer.") else [(parameter_name(name), tensors)]
        )
    }


def _of_gpt2(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """GPT-2 keeps matrices the other way round, and queries, keys and values in one."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("transformer.h."):
        yield f"{_GPT2[module]}.{kind}", tensor
        return
    _, _, layer, inner = module.split(".", 3)
    turned = tensor.t() if tensor.ndim == 2 else tensor
    parts = zip("qkv", turned.chunk(3), strict=True) if inner == "attn.c_attn" else [(_GPT2[inner], turned)]
    for role, part in parts:
        yield f"layers.{layer}.{role}.{kind}", part
