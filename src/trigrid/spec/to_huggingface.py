"""Writing the shape of a model as a Hugging Face `config.json`, the reverse of huggingface.py.

Keys are those of transformers 4, which 5 and other readers of such files understand as well.
"""

from __future__ import annotations

from typing import Any, Literal

from trigrid.errors import Problem, Refused
from trigrid.spec.model import ModelSpec, RopeScaling

Architecture = Literal["llama", "qwen2", "qwen3", "gpt2"]
CLASSES: dict[Architecture, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def architecture_of(spec: ModelSpec) -> Architecture:
    """The architecture of transformers that computes what a model of this shape does.

    Mistral without a sliding window computes what Llama does, and is written as Llama. Raises Refused where no
    architecture does.
    """
    problems = [Problem(f"model.{key}", value, reason) for key, value, reason in _without_likeness(spec)]
    if problems:
        raise Refused(problems)
    if spec.block == "gpt":
        return "gpt2"
    return "qwen3" if spec.qk_norm else "qwen2" if spec.qkv_bias else "llama"


def config_of_model(spec: ModelSpec, dtype: str, separator: int | None) -> dict[str, Any]:
    """What the `config.json` of a model holds, which `model_from_config` reads back to an equal shape.

    dtype: of its weights, as torch calls it. separator: the id between two documents of what the model was trained on,
    which begins and ends a text; None where it is not known. Raises Refused where transformers has no such model.
    """
    kind = architecture_of(spec)
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        # Named even where they are not known: transformers would take numbers of another vocabulary.
        "bos_token_id": separator,
        "eos_token_id": separator,
        **(_gpt2(spec) if kind == "gpt2" else _llama(spec, kind)),
        "tie_word_embeddings": spec.tied,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": spec.vocab,
    }


def _without_likeness(spec: ModelSpec) -> list[tuple[str, object, str]]:
    """Key, value and reason of each part of a shape that no architecture of transformers here has."""
    found: list[tuple[str, object, str]] = []
    if spec.experts is not None:
        found.append(("experts", spec.experts.count, "a mixture of experts is not exchanged with transformers so far"))
    if spec.latent is not None:
        found.append(("latent", spec.latent.kv_rank, "latent attention is not exchanged with transformers so far"))
    if spec.block == "gpt":
        if spec.heads * spec.head_dim != spec.hidden:
            found.append(
                ("head_dim", spec.head_dim, f"transformers' GPT-2 has hidden / heads = {spec.hidden / spec.heads:g}")
            )
        if spec.kv_heads != spec.heads:
            found.append(("kv_heads", spec.kv_heads, "transformers' GPT-2 does not group its heads"))
    elif spec.qkv_bias and spec.qk_norm:
        found.append(("qkv_bias", True, "no architecture of transformers has it together with qk_norm"))
    return found


def _gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "layer_norm_epsilon": spec.norm_eps,
        "n_embd": spec.hidden,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "n_layer": spec.layers,
        "n_positions": spec.context,
        "resid_pdrop": 0.0,
    }


def _llama(spec: ModelSpec, kind: Architecture) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "attention_dropout": 0.0,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": spec.context,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_scaling": _scaling(spec.rope_scaling) if spec.rope_scaling else None,
        "rope_theta": spec.rope_theta,
    }
    if kind != "qwen2":
        keys["attention_bias"] = False
    return keys | ({"mlp_bias": False} if kind == "llama" else {"sliding_window": None, "use_sliding_window": False})


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
