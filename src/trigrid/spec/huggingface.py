"""Reading the shape of a model from a Hugging Face `config.json`.

Where transformers' configuration classes give a missing key a value, the same value is taken if it is one rule for all
families (no rope theta: 10,000; no output bias). Where it is a number of one family, the file must state the key.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trigrid.errors import Problem, Refused
from trigrid.spec.model import ModelSpec, RopeScaling


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What an architecture means beyond the numbers in its configuration.

    stated: keys that the file must hold, if only as null. window: whether `sliding_window` may be missing, must be
    stated, or counts only where `use_sliding_window` switches it on.
    """

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    stated: tuple[str, ...] = ()
    window: Literal["optional", "stated", "switched"] = "optional"


_GPT2 = _Family(model_type="gpt2")
_FAMILIES = {
    "GPT2LMHeadModel": _GPT2,
    "LlamaForCausalLM": _Family(model_type="llama"),
    "MistralForCausalLM": _Family(model_type="mistral", window="stated", stated=("num_key_value_heads",)),
    "Qwen2ForCausalLM": _Family(model_type="qwen2", qkv_bias=True, window="switched", stated=("num_key_value_heads",)),
    "Qwen3ForCausalLM": _Family(
        model_type="qwen3", qk_norm=True, window="switched", stated=("num_key_value_heads", "head_dim")
    ),
}

_ATTENTION_KINDS = ("full_attention", "sliding_attention")


class _Keys:
    """The keys of one JSON object, read with checks; null counts as missing.

    What is wrong is added to `problems`, and 0, which no key may hold, is returned in its place.
    """

    def __init__(self, values: dict[str, Any], where: str, problems: list[Problem], prefix: str = ""):
        self.values = values
        self.where = where
        self.problems = problems
        self.prefix = prefix

    def refuse(self, key: str, reason: str, legal: tuple[object, ...] = ()) -> None:
        self.problems.append(Problem(self.prefix + key, self.values.get(key), reason, legal, self.where))

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            return self._missing(key) if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.refuse(key, "must be a whole number above 0")
            return 0
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            return self._missing(key) if default is None else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self.refuse(key, "must be a finite number above 0")
            return 0.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false", (default,))
        return value if isinstance(value, bool) else default

    def only(self, key: str, legal: object, reason: str) -> None:
        """Refuses any value but `legal`; a missing key means `legal`."""
        if self.values.get(key) not in (None, legal):
            self.refuse(key, reason, (legal,))

    def stated(self, key: str) -> None:
        if key not in self.values:
            self.refuse(key, "must be stated: where it is missing, transformers takes a number of this family")

    def child(self, key: str) -> _Keys:
        """The object under `key`; empty where it is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self.refuse(key, "must be an object or null")
        return _Keys(value if isinstance(value, dict) else {}, self.where, self.problems, f"{self.prefix}{key}.")

    def _missing(self, key: str) -> int:
        self.refuse(key, "this key is missing")
        return 0


def model_from_config(path: str | Path) -> ModelSpec:
    """The model that a `config.json`, or a folder holding one, describes; it is named after the folder.

    Reads LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and GPT2LMHeadModel, as transformers
    4 and 5 write them. Raises Refused with every problem of the file: what cannot be read, what is missing, and what
    trigrid does not model.
    """
    file, values = _load(Path(path))
    name = Path(os.path.abspath(file)).parent.name if file.name == "config.json" else file.stem
    return model_of_config(values, name, str(file))


def model_of_config(values: dict[str, Any], name: str, where: str = "") -> ModelSpec:
    """The model that the contents of a `config.json` describe, called `name`; see `model_from_config`."""
    problems: list[Problem] = []
    config = _Keys(values, where, problems)
    family = _family(config)
    if family is None:
        raise Refused(problems)
    spec = _gpt2(config, name) if family is _GPT2 else _llama(config, name, family)
    if problems:
        raise Refused(problems)
    return spec


def _llama(config: _Keys, name: str, family: _Family) -> ModelSpec:
    for key in family.stated:
        config.stated(key)
    config.only("hidden_act", "silu", "only SwiGLU is modelled")
    config.only("attention_bias", False, "it also puts a bias on the output projection, which is not modelled")
    config.only("mlp_bias", False, "biases in the feed-forward layer are not modelled")
    config.only("attention_dropout", 0, "dropout belongs to a training: run.attention_dropout")

    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    context = config.whole("max_position_embeddings")
    _check_window(config, family, context)
    rope_theta, rope_scaling = _rope(config)
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=config.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", heads),
        head_dim=_head_dim(config, hidden, heads),
        ffn=config.whole("intermediate_size"),
        vocab=config.whole("vocab_size"),
        context=context,
        block="llama",
        tied=config.flag("tie_word_embeddings", False),
        norm_eps=config.number("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _gpt2(config: _Keys, name: str) -> ModelSpec:
    """Its dropout, which belongs to a training and not to the model, is left out."""
    config.only("activation_function", "gelu_new", "only GELU by tanh is modelled")
    config.only("scale_attn_weights", True, "scores without a scale are not modelled")
    config.only("scale_attn_by_inverse_layer_idx", False, "scores scaled by the layer are not modelled")
    config.only("add_cross_attention", False, "only decoders are modelled")
    hidden, heads = config.whole("n_embd"), config.whole("n_head")
    if hidden and heads and hidden % heads:
        config.refuse("n_head", f"must divide n_embd = {hidden}")
    return ModelSpec(
        name=name,
        hidden=hidden,
        layers=config.whole("n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads if heads else 0,
        ffn=config.whole("n_inner", 4 * hidden),
        vocab=config.whole("vocab_size"),
        context=config.whole("n_positions"),
        block="gpt",
        tied=config.flag("tie_word_embeddings", True),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
    )


def _load(path: Path) -> tuple[Path, dict[str, Any]]:
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused([Problem("model", str(path), f"cannot be read: {error.strerror}", where=str(file))]) from error
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg}, column {error.colno}"
        raise Refused([Problem("model", str(path), reason, where=f"{file}:{error.lineno}")]) from error
    except (ValueError, RecursionError) as error:
        raise Refused([Problem("model", str(path), f"not JSON: {error}", where=str(file))]) from error
    if not isinstance(values, dict):
        raise Refused([Problem("model", str(path), "holds no JSON object", where=str(file))])
    return file, values


def _family(config: _Keys) -> _Family | None:
    """By architecture or, in a file written from a configuration alone, by model type; None after a refusal."""
    kind = config.values.get("model_type")
    named = config.values.get("architectures")
    if not named:
        family = next((f for f in _FAMILIES.values() if f.model_type == kind), None)
        if family is None:
            legal = tuple(f.model_type for f in _FAMILIES.values())
            config.refuse("model_type", "the file names no architecture, and trigrid does not know this type", legal)
        return family
    family = _FAMILIES.get(named[0]) if isinstance(named, list) and isinstance(named[0], str) else None
    if family is None:
        config.refuse("architectures", "trigrid does not know this architecture", tuple(_FAMILIES))
    elif kind not in (None, family.model_type):
        config.refuse("model_type", f"does not go with the architecture {named[0]}", (family.model_type,))
    return family


def _head_dim(config: _Keys, hidden: int, heads: int) -> int:
    if config.values.get("head_dim") is None and hidden and heads and hidden % heads:
        config.refuse("head_dim", f"missing, and hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        return 0
    return config.whole("head_dim", hidden // heads if heads else 0)


def _check_window(config: _Keys, family: _Family, context: int) -> None:
    layers = config.values.get("layer_types")
    # Which layers slide does not matter: a window that is as long as the context hides nothing.
    if layers is not None and not (isinstance(layers, list) and all(k in _ATTENTION_KINDS for k in layers)):
        config.refuse("layer_types", "only full attention is modelled", ("full_attention",))
    if family.window == "switched" and not config.flag("use_sliding_window", False):
        return
    if family.window != "optional":
        config.stated("sliding_window")
    if config.values.get("sliding_window") is not None and 0 < config.whole("sliding_window") < context:
        reason = f"sliding windows are not modelled, and this one is shorter than max_position_embeddings {context}"
        config.refuse("sliding_window", reason, ("null", context))


def _rope(config: _Keys) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary positions, from `rope_theta` and `rope_scaling` (transformers 4) or from
    `rope_parameters`, which holds both (transformers 5)."""
    scaling, parameters = config.child("rope_scaling"), config.child("rope_parameters")
    if scaling.values and parameters.values:
        config.refuse("rope_scaling", "rope_parameters is given as well: keep one of them")
    rope = scaling if scaling.values else parameters

    theta = config.number("rope_theta", 10_000.0)
    inner = rope.number("rope_theta", theta)
    if config.values.get("rope_theta") is not None and theta and inner and inner != theta:
        config.refuse("rope_theta", f"{rope.prefix}rope_theta gives another base, {inner}")
    config.only("partial_rotary_factor", 1, "positions that turn only a part of each head are not modelled")
    rope.only("partial_rotary_factor", 1, "positions that turn only a part of each head are not modelled")

    stated = {key for key, value in rope.values.items() if value is not None}
    key = "rope_type" if "rope_type" in stated else "type"
    plain = stated <= {"rope_theta", "partial_rotary_factor"}
    match rope.values.get(key, "default" if plain else None):
        case "default":
            return inner, None
        case "llama3":
            return inner, RopeScaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_context=rope.whole("original_max_position_embeddings"),
            )
        case _:
            rope.refuse(key, "this kind of position scaling is not modelled", ("default", "llama3"))
            return inner, None
