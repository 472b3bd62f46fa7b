"""The exchange with transformers, name by name and key by key: which tensor holds which parameter, which config which
shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trigrid.blueprint import decoder
from trigrid.errors import Refused
from trigrid.models.huggingface import Place, known_as, places, tensors, turned, turned_back
from trigrid.spec.huggingface import model_from_config
from trigrid.spec.model import ModelSpec
from trigrid.spec.models import catalogue
from trigrid.spec.to_huggingface import config_of_model

SMALL = ModelSpec(
    name="small", hidden=24, layers=2, heads=4, kv_heads=2, head_dim=10, ffn=32, vocab=29, context=64, norm_eps=1e-6
)
GPT = replace(SMALL, block="gpt", kv_heads=4, head_dim=6)
SHAPES = {
    "llama": SMALL,
    "llama tied": replace(SMALL, tied=True),
    "qwen2": replace(SMALL, qkv_bias=True),
    "qwen2 tied": replace(SMALL, qkv_bias=True, tied=True),
    "qwen3": replace(SMALL, qk_norm=True),
    "qwen3 tied": replace(SMALL, qk_norm=True, tied=True),
    "gpt2": GPT,
    "gpt2 tied": replace(GPT, tied=True),
}
EXCHANGED = {n: e.spec for n, e in catalogue().items() if e.spec.experts is None and e.spec.latent is None}


def folder_of(spec: ModelSpec, folder: Path) -> Path:
    """A folder with the config of `spec`, called as the model is."""
    made = folder / spec.name
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config_of_model(spec, "float32", 0)), encoding="utf-8")
    return made


def state_dict_of(spec: ModelSpec, folder: Path) -> dict[str, Tensor]:
    """Names and shapes of the tensors that transformers makes for the config of `spec`; a tied head is left out."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder_of(spec, folder)))
    state: dict[str, Tensor] = model.state_dict()
    assert bool(model.config.tie_word_embeddings) == spec.tied
    return {name: tensor for name, tensor in state.items() if not (spec.tied and name == "lm_head.weight")}


@pytest.mark.parametrize("spec", [*SHAPES.values(), *(replace(s, layers=2) for s in EXCHANGED.values())], ids=str)
def test_every_tensor_is_used_and_every_parameter_is_filled(spec: ModelSpec, tmp_path: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in state_dict_of(spec, tmp_path).items()}
    parameters = decoder(spec).parameters
    found = tensors(spec)
    assert {name: place.shape for name, inside in found.items() for place in inside.values()} == expected
    assert sorted(name for inside in found.values() for name in inside) == sorted(parameters)
    for name, place in places(spec).items():
        sides = tuple(stop - start for start, stop in place.box)
        assert (sides[::-1] if place.transposed else sides) == parameters[name].shape


@pytest.mark.parametrize("spec", SHAPES.values(), ids=list(SHAPES))
def test_every_element_of_a_tensor_belongs_to_one_parameter(spec: ModelSpec) -> None:
    for name, inside in tensors(spec).items():
        times = torch.zeros(next(iter(inside.values())).shape)
        for place in inside.values():
            times[tuple(slice(*ends) for ends in place.box)] += 1
        assert bool((times == 1).all()), name


@pytest.mark.parametrize(
    "place",
    [Place("t", (4, 9), ((0, 4), (3, 6))), Place("t", (4, 9), ((0, 4), (3, 6)), True), Place("t", (9,), ((3, 6),))],
    ids=["part", "part, transposed", "vector"],
)
def test_a_box_goes_there_and_back(place: Place) -> None:
    whole = torch.arange(36).view(4, 9) if len(place.shape) == 2 else torch.arange(9)
    own = whole[tuple(slice(*ends) for ends in place.box)]
    parameter = own.t() if place.transposed else own
    box = ((1, 2), (0, 2))[: parameter.ndim]
    there = turned(box, place)
    taken = whole[tuple(slice(*ends) for ends in there)]
    assert (taken.t() if place.transposed else taken).equal(parameter[tuple(slice(*ends) for ends in box)])
    assert turned_back(there, place) == box
    assert turned_back(tuple((0, n) for n in place.shape), place) == tuple((0, n) for n in parameter.shape)
    assert turned_back(tuple((0, 1) for _ in place.shape), place) is None


@pytest.mark.parametrize("spec", [*SHAPES.values(), *EXCHANGED.values()], ids=lambda spec: spec.name)
def test_a_config_is_read_back_to_the_same_shape(spec: ModelSpec, tmp_path: Path) -> None:
    folder = folder_of(spec, tmp_path)
    assert model_from_config(folder) == spec
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "again" / spec.name)
    assert model_from_config(tmp_path / "again" / spec.name) == spec


def test_a_config_names_the_end_of_a_text(tmp_path: Path) -> None:
    """Where it did not, transformers would end texts at number 2 of a vocabulary that means something else by it."""
    for spec in SHAPES.values():
        for separator in (None, 7):
            path = tmp_path / "config.json"
            path.write_text(json.dumps(config_of_model(spec, "bfloat16", separator)), encoding="utf-8")
            config = AutoConfig.from_pretrained(tmp_path)
            assert (config.bos_token_id, config.eos_token_id) == (separator, separator)
            assert config.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        (catalogue()["mixtral-8x7b"].spec, "model.experts"),
        (replace(catalogue()["deepseek-v3"].spec, experts=None), "model.latent"),
        (replace(SMALL, qkv_bias=True, qk_norm=True), "model.qkv_bias"),
        (replace(GPT, head_dim=8), "model.head_dim"),
        (replace(GPT, kv_heads=2), "model.kv_heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_transformers_has_not_is_refused(spec: ModelSpec, key: str) -> None:
    for made in (places, lambda spec: config_of_model(spec, "float32", None)):
        with pytest.raises(Refused) as refused:
            made(spec)
        assert [problem.key for problem in refused.value.problems] == [key]


def test_older_files_use_shorter_names_and_hold_more() -> None:
    bare = ["wte.weight", "h.0.attn.bias", "h.0.attn.masked_bias", "h.0.attn.c_attn.bias", "ln_f.weight"]
    assert known_as(bare, GPT) == {
        "transformer.wte.weight": "wte.weight",
        "transformer.h.0.attn.c_attn.bias": "h.0.attn.c_attn.bias",
        "transformer.ln_f.weight": "ln_f.weight",
    }
    llama = ["model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert known_as(llama, SMALL) == {name: name for name in llama[:2]}
