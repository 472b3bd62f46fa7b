"""Reading a model from a Hugging Face config.json: what is read, and what is refused with which reason."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from trigrid.blueprint import decoder
from trigrid.errors import Refused
from trigrid.spec.huggingface import model_from_config
from trigrid.spec.model import ModelSpec, RopeScaling
from trigrid.spec.models import catalogue, load_model, resolve_model

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
# As the first Llama 2 checkpoints were written: no rope_theta, no biases, no head_dim, heads not grouped.
LLAMA2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "vocab_size": 32000,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "head_dim": None,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_05B = ModelSpec(
    name="qwen2.5-0.5b",
    hidden=896,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    ffn=4864,
    vocab=151936,
    context=32768,
    tied=True,
    norm_eps=1e-6,
    rope_theta=1e6,
    qkv_bias=True,
)
BASES = {"llama": LLAMA, "llama2": LLAMA2, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}
REMOVED = object()


def edited(base, **changes):
    values = {**BASES[base], **changes}
    return {key: value for key, value in values.items() if value is not REMOVED}


@pytest.fixture
def write(tmp_path):
    def write(config, name="config.json"):
        folder = tmp_path / "a-model"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
        return folder / name

    return write


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("llama", load_model("llama3.1-8b")),
        ("llama2", load_model("llama2-7b")),
        ("mistral", load_model("mistral-7b")),
        ("qwen2", QWEN25_05B),
        ("qwen3", load_model("qwen3-0.6b")),
    ],
)
def test_a_published_configuration_gives_the_model(write, base, expected):
    file = write(BASES[base])
    expected = replace(expected, name="a-model")
    assert model_from_config(file) == expected
    assert model_from_config(file.parent) == expected
    assert resolve_model(str(file)) == resolve_model(str(file.parent)) == expected


def test_the_name_is_that_of_the_folder_or_of_the_file(write, monkeypatch):
    file = write(LLAMA)
    monkeypatch.chdir(file.parent)
    assert model_from_config("config.json").name == model_from_config(".").name == "a-model"
    assert model_from_config(write(LLAMA, "tiny.json")).name == "tiny"


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        ("llama", {"num_key_value_heads": REMOVED}, {"kv_heads": 32}),
        ("qwen2", {"num_key_value_heads": None}, {"kv_heads": 14}),
        ("llama", {"head_dim": 64}, {"head_dim": 64}),
        ("llama", {"head_dim": None}, {"head_dim": 128}),
        ("llama", {"tie_word_embeddings": True}, {"tied": True}),
        ("llama", {"tie_word_embeddings": REMOVED}, {"tied": False}),
        ("llama", {"architectures": REMOVED}, {}),
        ("qwen2", {"architectures": None}, {"qkv_bias": True}),
        ("llama", {"model_type": REMOVED}, {}),
        ("llama", {"hidden_act": REMOVED, "attention_bias": None}, {}),
        ("llama", {"rope_scaling": None}, {"rope_scaling": None}),
        ("llama", {"rope_scaling": {}}, {"rope_scaling": None}),
        ("llama", {"rope_scaling": {"type": "default"}}, {"rope_scaling": None}),
        ("llama", {"rope_scaling": {**LLAMA3_SCALING, "type": "llama3", "rope_type": None}}, {}),
        ("llama", {"rope_scaling": REMOVED, "rope_theta": REMOVED}, {"rope_scaling": None, "rope_theta": 10_000.0}),
        (
            "llama",
            {"rope_scaling": {**LLAMA3_SCALING, "factor": 32, "low_freq_factor": 2, "high_freq_factor": 8}},
            {"rope_scaling": RopeScaling(factor=32.0, low_freq_factor=2.0, high_freq_factor=8.0)},
        ),
        (
            "llama",
            {"rope_scaling": {**LLAMA3_SCALING, "original_max_position_embeddings": 4096}},
            {"rope_scaling": RopeScaling(factor=8.0, original_context=4096)},
        ),
        (
            "llama",
            {"rope_scaling": REMOVED, "rope_theta": REMOVED, "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 7e5}},
            {"rope_theta": 7e5},
        ),
        ("llama", {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}}, {"rope_scaling": None}),
        ("llama", {"partial_rotary_factor": 1.0}, {}),
        ("mistral", {"sliding_window": 32768}, {}),
        ("mistral", {"sliding_window": 40000}, {}),
        ("qwen2", {"use_sliding_window": REMOVED}, {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32768, "layer_types": ["sliding_attention"] * 24}, {}),
        ("qwen3", {"layer_types": ["full_attention"] * 28}, {}),
    ],
)
def test_what_may_be_missing_or_written_otherwise(write, base, changes, expected):
    plain = model_from_config(write(BASES[base]))
    assert model_from_config(write(edited(base, **changes))) == replace(plain, **expected)


@pytest.mark.parametrize(
    ("base", "changes", "key", "reason"),
    [
        ("llama", {"architectures": ["BloomForCausalLM"]}, "architectures", "does not know this architecture"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures", "does not know"),
        ("llama", {"architectures": [["LlamaForCausalLM"]]}, "architectures", "does not know"),
        ("llama", {"architectures": [], "model_type": "gemma"}, "model_type", "names no architecture"),
        ("llama", {"architectures": REMOVED, "model_type": REMOVED}, "model_type", "names no architecture"),
        ("llama", {"model_type": "mistral"}, "model_type", "does not go with the architecture LlamaForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act", "only SwiGLU"),
        ("llama", {"attention_bias": True}, "attention_bias", "output projection"),
        ("qwen3", {"attention_bias": True}, "attention_bias", "output projection"),
        ("llama", {"mlp_bias": True}, "mlp_bias", "feed-forward"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout", "dropout"),
        ("llama", {"hidden_size": 4096.0}, "hidden_size", "whole number above 0"),
        ("llama", {"hidden_size": "4096"}, "hidden_size", "whole number above 0"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers", "whole number above 0"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers", "whole number above 0"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads", "whole number above 0"),
        ("llama2", {"num_attention_heads": REMOVED}, "num_attention_heads", "missing"),
        ("llama", {"hidden_size": None}, "hidden_size", "missing"),
        ("llama", {"head_dim": "x"}, "head_dim", "whole number above 0"),
        ("llama", {"hidden_size": 4100}, "head_dim", "4100 is no multiple of num_attention_heads 32"),
        ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps", "finite number above 0"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps", "finite number above 0"),
        ("llama", {"rope_theta": 10**400}, "rope_theta", "finite number above 0"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta", "finite number above 0"),
        (
            "llama",
            {"rope_theta": 0, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta",
            "finite number above 0",
        ),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
        ("mistral", {"num_key_value_heads": REMOVED}, "num_key_value_heads", "must be stated"),
        ("qwen3", {"head_dim": REMOVED}, "head_dim", "must be stated"),
        ("mistral", {"sliding_window": 4096}, "sliding_window", "not modelled, and this one is shorter than"),
        ("mistral", {"sliding_window": 4096, "use_sliding_window": False}, "sliding_window", "not modelled"),
        ("mistral", {"sliding_window": REMOVED}, "sliding_window", "must be stated"),
        ("qwen2", {"use_sliding_window": True}, "sliding_window", "not modelled"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": REMOVED}, "sliding_window", "must be stated"),
        ("llama", {"sliding_window": 4096}, "sliding_window", "not modelled"),
        ("qwen3", {"layer_types": ["linear_attention"] * 28}, "layer_types", "only full attention"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type", "not modelled"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "type": "llama3"}}, "rope_scaling.rope_type", "not modelled"),
        ("llama", {"rope_scaling": {"factor": 2.0}}, "rope_scaling.type", "not modelled"),
        ("llama", {"rope_scaling": ["llama3"]}, "rope_scaling", "object or null"),
        ("llama", {"rope_scaling": {"rope_type": ["llama3"]}}, "rope_scaling.rope_type", "not modelled"),
        ("llama", {"rope_scaling": {**LLAMA3_SCALING, "factor": None}}, "rope_scaling.factor", "missing"),
        (
            "llama",
            {"rope_scaling": {**LLAMA3_SCALING, "original_max_position_embeddings": 0.5}},
            "rope_scaling.original_max_position_embeddings",
            "whole number",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "rope_scaling", "keep one of them"),
        (
            "llama",
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}},
            "rope_theta",
            "rope_parameters.rope_theta gives another base, 10000.0",
        ),
        (
            "llama",
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
            "only a part",
        ),
        (
            "llama",
            {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters.type",
            "not modelled",
        ),
    ],
)
def test_what_is_not_modelled_or_wrong_is_refused_once(write, base, changes, key, reason):
    file = write(edited(base, **changes))
    with pytest.raises(Refused) as refused:
        model_from_config(file)
    (problem,) = refused.value.problems
    assert problem.key == key
    assert reason in problem.reason
    assert problem.where == str(file)
    assert str(file) in str(refused.value)


def test_refused_kinds_are_told_with_the_accepted_ones(write):
    with pytest.raises(Refused) as refused:
        model_from_config(write(edited("llama", architectures=["MixtralForCausalLM"])))
    assert "Qwen3ForCausalLM" in refused.value.problems[0].legal
    with pytest.raises(Refused) as refused:
        model_from_config(write(edited("llama", rope_scaling={"rope_type": "yarn"})))
    assert refused.value.problems[0].value == "yarn"
    assert refused.value.problems[0].legal == ("default", "llama3")


def test_every_problem_is_told_at_once(write):
    changes = {
        "vocab_size": REMOVED,
        "hidden_size": -1,
        "hidden_act": "relu",
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "dynamic"},
        "sliding_window": 128,
        "tie_word_embeddings": 1,
    }
    with pytest.raises(Refused) as refused:
        model_from_config(write(edited("llama", **changes)))
    told = sorted(problem.key for problem in refused.value.problems)
    assert told == sorted("rope_scaling.rope_type" if key == "rope_scaling" else key for key in changes)


@pytest.mark.parametrize("base", BASES)
def test_each_required_key_is_asked_for_by_name(write, base):
    required = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    for key in required:
        with pytest.raises(Refused) as refused:
            model_from_config(write(edited(base, **{key: REMOVED})))
        assert [p.key for p in refused.value.problems] == [key]
    with pytest.raises(Refused) as refused:
        model_from_config(write({"architectures": BASES[base]["architectures"]}))
    assert {p.key for p in refused.value.problems} >= set(required)


@pytest.mark.parametrize("base", BASES)
def test_no_value_of_any_key_escapes_as_another_error_or_as_zero(write, base):
    junk = [None, True, False, 0, -1, 3, 1e999, 0.5, "", "x", [], [1], {}, {"x": 1}, [[]], 10**30]
    for key in (*BASES[base], "rope_parameters", "layer_types", "sliding_window", "head_dim", "use_sliding_window"):
        for value in junk:
            with suppress(Refused):
                spec = model_from_config(write(edited(base, **{key: value})))
                assert min(spec.hidden, spec.kv_heads, spec.head_dim, spec.context, spec.norm_eps, spec.rope_theta) > 0


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('{\n "hidden_size": 4096,\n "vocab_size" 3\n}', 3, "not JSON"),
        ("", 1, "not JSON"),
        ("[1, 2]", None, "no JSON object"),
        ("null", None, "no JSON object"),
        ("[" * 200_000, None, "not JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", None, "not JSON"),
    ],
)
def test_broken_files_are_refused_with_the_line(write, text, line, reason):
    file = write(text)
    with pytest.raises(Refused, match=reason) as refused:
        model_from_config(file)
    assert refused.value.problems[0].where == (f"{file}:{line}" if line else str(file))


def test_what_cannot_be_opened_is_refused(tmp_path):
    missing = tmp_path / "nothing.json"
    for path, where in ((missing, missing), (tmp_path, tmp_path / "config.json"), (tmp_path / ("x" * 5000), None)):
        with pytest.raises(Refused, match="cannot be read") as refused:
            model_from_config(path)
        assert refused.value.problems[0].where == str(where or path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(Refused, match="not JSON"):
        model_from_config(tmp_path)


@pytest.mark.parametrize("name", [n for n, e in catalogue().items() if e.spec.block == "llama" and not e.spec.experts])
def test_files_written_by_transformers_are_read_back(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    spec = load_model(name)
    scaling = spec.rope_scaling and {
        "rope_type": "llama3",
        "factor": spec.rope_scaling.factor,
        "low_freq_factor": spec.rope_scaling.low_freq_factor,
        "high_freq_factor": spec.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": spec.rope_scaling.original_context,
    }
    family = {"llama": "LlamaConfig", "mistr": "MistralConfig", "qwen3": "Qwen3Config"}[name[:5]]
    config = getattr(transformers, family)(
        hidden_size=spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.ffn,
        vocab_size=spec.vocab,
        max_position_embeddings=spec.context,
        tie_word_embeddings=spec.tied,
        rms_norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        rope_scaling=scaling,
        sliding_window=None,
    )
    config.to_json_file(tmp_path / "config.json")
    assert model_from_config(tmp_path) == replace(spec, name=tmp_path.name)


GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
}


def test_gpt2(write):
    """The smallest of Radford 2019: 124 million parameters."""
    spec = model_from_config(write(GPT2))
    assert (spec.block, spec.tied, spec.ffn, spec.head_dim, spec.context) == ("gpt", True, 3072, 64, 1024)
    assert decoder(spec).count == 124_439_808


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"activation_function": "relu"}, "activation_function"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"n_head": 7}, "n_head"),
        ({"n_layer": None}, "n_layer"),
    ],
)
def test_what_gpt2_may_not_say(write, changes, key):
    with pytest.raises(Refused) as refused:
        model_from_config(write({**GPT2, **changes}))
    assert [problem.key for problem in refused.value.problems] == [key]
