"""The catalogue: its counts against published ones, its fields, and how names are found."""

import tomllib
from dataclasses import fields, replace
from importlib.resources import files

import pytest

from trigrid.blueprint import decoder
from trigrid.errors import Refused
from trigrid.spec.model import ModelSpec, RopeScaling
from trigrid.spec.models import catalogue, load_model, resolve_model

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gpt3-175b": 174_604_259_328,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}
ENTRIES = catalogue()


def test_the_catalogue_holds_the_published_models_and_megatrons_shapes():
    assert ENTRIES.keys() == PUBLISHED.keys() | {"megatron-530b", "megatron-1t"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert ENTRIES[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ENTRIES)
def test_the_blueprint_counts_what_the_entry_says(name):
    assert decoder(ENTRIES[name].spec).count == ENTRIES[name].parameters


@pytest.mark.parametrize(
    ("name", "billions"), [("megatron-530b", "529.6"), ("megatron-1t", "1008.0"), ("gpt3-175b", "174.6")]
)
def test_gpt_shapes_agree_with_the_formula_of_narayanan_2021(name, billions):
    """Equation 2, which leaves out the final norm: P = 12 l h² (1 + 13 / (12 h) + (V + s) / (12 l h))."""
    spec = ENTRIES[name].spec
    h, layers = spec.hidden, spec.layers
    formula = 12 * layers * h * h + 13 * layers * h + (spec.vocab + spec.context) * h
    assert ENTRIES[name].parameters == formula + 2 * h
    assert f"{formula / 1e9:.1f}" == billions
    assert spec.ffn == 4 * h
    assert spec.heads * spec.head_dim == h


@pytest.mark.parametrize("file", [f for f in (files("trigrid.spec") / "catalogue").iterdir()], ids=lambda f: f.name)
def test_entries_state_every_field_themselves(file):
    """A later change of a default of ModelSpec must not change a published model."""
    assert file.name.endswith(".toml")
    everything = {f.name for f in fields(ModelSpec)} - {"name"}
    absent = {"rope_scaling", "experts", "latent"}
    optional = {"llama": absent, "gpt": {*absent, "rope_theta", "qkv_bias", "qk_norm"}}
    for name, entry in tomllib.loads(file.read_text(encoding="utf-8")).items():
        missing = everything - entry.keys()
        assert missing <= optional[entry["block"]], name
        assert entry.keys() - everything <= {"source", "parameters", "aliases"}, name
        assert len(entry["source"]) > 10


def test_types_are_those_of_the_spec():
    for name, entry in ENTRIES.items():
        spec = entry.spec
        assert spec.name == name
        sizes = (spec.hidden, spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn, spec.vocab, spec.context)
        assert all(type(size) is int and size > 0 for size in sizes), name
        assert type(spec.norm_eps) is float
        assert type(spec.rope_theta) is float
        assert spec.heads % spec.kv_heads == 0, name


def test_llama_3_1_stretches_the_positions_of_llama_3():
    for size in ("8b", "70b"):
        old, new = load_model(f"llama3-{size}"), load_model(f"llama3.1-{size}")
        assert (old.context, old.rope_theta, old.rope_scaling) == (8192, 500_000.0, None)
        scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
        assert new == replace(old, name=new.name, context=131_072, rope_scaling=scaling)
    small = load_model("llama3.2-1b")
    assert small.tied
    assert small.rope_scaling == RopeScaling(factor=32.0)


def test_families_differ_where_they_should():
    qwen = [e.spec for n, e in ENTRIES.items() if n.startswith("qwen3") and not e.spec.experts]
    assert {s.name for s in qwen if s.tied} == {"qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"}
    assert {(s.qk_norm, s.qkv_bias, s.head_dim, s.context, s.norm_eps, s.rope_theta) for s in qwen} == {
        (True, False, 128, 40960, 1e-6, 1e6)
    }
    assert load_model("mistral-7b").context == 32768
    assert load_model("gpt3-175b").block == "gpt"


def test_an_alias_finds_the_model_under_its_own_name():
    assert load_model("llama3-405b") == load_model("llama3.1-405b")
    assert load_model("llama3-405b").name == "llama3.1-405b"
    names = [name for key, entry in ENTRIES.items() for name in (key, *entry.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("llama3-8", "llama3-8b"),
        ("Llama-3.1-70B", "llama3.1-70b"),
        ("qwen-0.6b", "qwen3-0.6b"),
        ("mistral", "mistral-7b"),
    ],
)
def test_a_wrong_name_is_refused_with_the_closest_ones(wrong, meant):
    with pytest.raises(Refused) as refused:
        load_model(wrong)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("model", wrong)
    assert meant in problem.legal
    assert len(problem.legal) <= 3


def test_a_name_like_no_other_is_refused_with_all_of_them():
    with pytest.raises(Refused) as refused:
        load_model("zzzz")
    assert set(refused.value.problems[0].legal) >= ENTRIES.keys()


def test_resolving_prefers_the_catalogue_and_reads_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3-8b").mkdir()
    assert resolve_model("llama3-8b") == load_model("llama3-8b")
    with pytest.raises(Refused, match=r"config\.json"):
        resolve_model("./llama3-8b")


@pytest.mark.parametrize("text", ["meta-llama/Llama-3.1-8B", "llama3.1-8", "", "nowhere/config.json", "x" * 5000, "\0"])
def test_what_is_neither_name_nor_path_is_refused(text):
    with pytest.raises(Refused, match="neither a model of the catalogue nor an existing") as refused:
        resolve_model(text)
    assert refused.value.problems[0].legal
    if "3.1-8" in text:
        assert "llama3.1-8b" in refused.value.problems[0].legal
