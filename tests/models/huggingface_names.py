"""What transformers calls the parameters of Llama, Mistral, Qwen2 and Qwen3, in trigrid's names."""

from __future__ import annotations

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
