"""The units of a decoder and which stage holds which."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint import decoder, split_layers
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

# head_dim ≠ hidden / heads, so that a width taken from the wrong product shows.
LLAMA = ModelSpec(name="llama", hidden=10, layers=2, heads=6, kv_heads=2, head_dim=4, ffn=7, vocab=11, context=16)
GPT = ModelSpec(
    name="gpt", hidden=12, layers=2, heads=3, kv_heads=3, head_dim=4, ffn=20, vocab=11, context=16, block="gpt"
)


def of_layers(layers: int) -> ModelSpec:
    return replace(LLAMA, layers=layers)


# Parameters


def test_the_parameters_of_a_llama_block() -> None:
    """R37: queries are 6 · 4 wide and keys 2 · 4, whatever the hidden size."""
    shapes = {name: p.shape for name, p in decoder(LLAMA).parameters.items() if not name.startswith("layers.1.")}
    assert shapes == {
        "embedding.weight": (11, 10),
        "layers.0.attention_norm.weight": (10,),
        "layers.0.q.weight": (24, 10),
        "layers.0.k.weight": (8, 10),
        "layers.0.v.weight": (8, 10),
        "layers.0.o.weight": (10, 24),
        "layers.0.ffn_norm.weight": (10,),
        "layers.0.gate.weight": (7, 10),
        "layers.0.up.weight": (7, 10),
        "layers.0.down.weight": (10, 7),
        "final_norm.weight": (10,),
        "head.weight": (11, 10),
    }


def test_biases_and_head_norms_come_where_they_are_asked_for() -> None:
    plain = decoder(LLAMA).parameters
    asked = decoder(replace(LLAMA, qkv_bias=True, qk_norm=True)).parameters
    added = {name: p.shape for name, p in asked.items() if name not in plain and name.startswith("layers.0.")}
    assert added == {
        "layers.0.q.bias": (24,),
        "layers.0.k.bias": (8,),
        "layers.0.v.bias": (8,),
        "layers.0.q_norm.weight": (4,),
        "layers.0.k_norm.weight": (4,),
    }
    assert plain.items() <= asked.items()


def test_the_parameters_of_a_gpt() -> None:
    norms, squares = ("attention_norm", "ffn_norm"), ("q", "k", "v", "o")
    block: dict[str, tuple[int, ...]] = {
        **{f"{role}.{kind}": (12,) for role in norms for kind in ("weight", "bias")},
        **{f"{role}.weight": (12, 12) for role in squares},
        **{f"{role}.bias": (12,) for role in squares},
        "up.weight": (20, 12),
        "up.bias": (20,),
        "down.weight": (12, 20),
        "down.bias": (12,),
    }
    assert {name: p.shape for name, p in decoder(GPT).parameters.items()} == {
        "embedding.weight": (11, 12),
        "positions.weight": (16, 12),
        **{f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in block.items()},
        "final_norm.weight": (12,),
        "final_norm.bias": (12,),
        "head.weight": (11, 12),
    }


@pytest.mark.parametrize("spec", [replace(LLAMA, qkv_bias=True, qk_norm=True), GPT], ids=lambda s: s.name)
def test_matrices_decay_and_start_random_norms_and_biases_do_neither(spec: ModelSpec) -> None:
    for name, p in decoder(spec).parameters.items():
        if len(p.shape) == 2:
            into_residual = p.role in ("o", "down")
            assert p.decay, name
            assert p.std == pytest.approx(0.02 / sqrt(2 * spec.layers) if into_residual else 0.02), name
        else:
            assert (p.decay, p.std, p.fill) == (False, None, 0.0 if name.endswith("bias") else 1.0), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spec", [replace(LLAMA, qkv_bias=True, qk_norm=True), GPT], ids=lambda s: s.name)
def test_roles_tell_the_parameters_of_a_unit_apart_and_names_those_of_the_model(spec: ModelSpec, tied: bool) -> None:
    blueprint = decoder(replace(spec, tied=tied))
    for unit in blueprint.units:
        roles = [p.role for p in unit.parameters]
        assert len(set(roles)) == len(roles)
    names = Counter(p.name for unit in blueprint.units for p in unit.parameters)
    assert {name for name, n in names.items() if n > 1} == ({"embedding.weight"} if tied else set())


def test_a_tied_weight_is_one_parameter_in_two_units_and_counts_once() -> None:
    tied, untied = decoder(replace(LLAMA, tied=True)), decoder(LLAMA)
    assert untied.count - tied.count == 11 * 10
    assert untied.count == 2 * 110 + 10 + 2 * (2 * 10 + 2 * 240 + 2 * 80 + 3 * 70)
    first, last = tied.units[0].parameters[0], tied.units[-1].parameters[-1]
    assert replace(last, role="embedding") == first
    assert (first.tied, first.role, last.role) == (True, "embedding", "head")
    assert not any(p.tied for p in untied.parameters.values())


# Stages


@pytest.mark.parametrize("pp", range(1, 9))
def test_layers_are_split_evenly_and_completely(pp: int) -> None:
    """R28, R30: for 1 to 40 layers; the first and the last stage hold no more than any other."""
    for layers in range(1, 41):
        split = split_layers(layers, pp)
        assert len(split) == pp
        assert sum(split) == layers
        assert max(split) - min(split) <= 1
        assert split[-1] == min(split)
        assert split[0] == min(split) or split.count(min(split)) == 1


def test_the_leftover_goes_to_the_back_but_not_to_the_last() -> None:
    assert split_layers(10, 3) == (3, 4, 3)
    assert split_layers(6, 4) == (1, 2, 2, 1)
    assert split_layers(5, 4) == (1, 1, 2, 1)
    assert split_layers(7, 4) == (2, 2, 2, 1)


def test_llama_3_405b_over_16_stages() -> None:
    """126 layers: the stages that also hold the embedding and the head have 7, all others 8."""
    assert split_layers(126, 16) == (7, *[8] * 14, 7)


@pytest.mark.parametrize("pp", range(1, 9))
def test_the_stages_hold_every_unit_once_and_in_order(pp: int) -> None:
    """R28, R30: for 1 to 40 layers the units of all stages, one after another, are the units of the model."""
    for layers in range(1, 41):
        blueprint = decoder(of_layers(layers))
        stages = [blueprint.stage(Layout(pp=pp), stage) for stage in range(pp)]
        assert sum(stages, ()) == blueprint.units
        assert blueprint.units[0] in stages[0]
        assert blueprint.units[-1] in stages[-1]
        split = split_layers(layers, pp)
        assert tuple(sum(unit.kind == "llama" for unit in stage) for stage in stages) == split
        if pp <= layers + 2:
            assert all(stages), (layers, pp)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(sum))
@settings(max_examples=40, deadline=None)
def test_a_given_split_is_followed(split: list[int]) -> None:
    """R28, R29: also with one stage, and with a first and a last stage that hold no layer."""
    blueprint = decoder(of_layers(sum(split)))
    layout = Layout(pp=len(split), stage_layers=tuple(split))
    stages = [blueprint.stage(layout, stage) for stage in range(layout.pp)]
    assert sum(stages, ()) == blueprint.units
    assert [sum(unit.kind == "llama" for unit in stage) for stage in stages] == split


def test_units_are_named_after_their_place_in_the_model() -> None:
    """R32: the names of a stage are global, so a checkpoint can be read with any other split."""
    blueprint = decoder(of_layers(5))
    second = blueprint.stage(Layout(pp=2), 1)
    assert [unit.name for unit in second] == ["layers.3", "layers.4", "head"]
    assert all(p.name.startswith("layers.3.") for p in second[0].parameters)
