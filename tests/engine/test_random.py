"""Initial values: the same elements under every layout, and the distribution that the parameter declares."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import combinations
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trigrid.blueprint import decoder
from trigrid.blueprint.parameters import LocalParameter, Parameter, localise
from trigrid.engine import random
from trigrid.engine.random import BLOCK_NUMEL, draw
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

SPEC = ModelSpec(
    name="awkward",
    hidden=48,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=6,
    ffn=1600,
    vocab=1501,
    context=64,
    qkv_bias=True,
    qk_norm=True,
)


def matrix(*shape: int, name: str = "w", std: float = 1.0, cut: int | None = None, pieces: int = 0) -> Parameter:
    return Parameter(name=name, role=name, shape=shape, std=std, cut=cut, pieces=pieces)


def whole(parameter: Parameter, seed: int = 0) -> Tensor:
    return draw(localise(parameter, Layout(), 0), seed)


def inside(local: LocalParameter) -> tuple[slice, ...]:
    """Where the box of `local` lies in the global parameter."""
    return tuple(slice(*ends) for ends in local.box)


def assert_slices(parameter: Parameter, tp: int, expected: Tensor, seed: int = 0) -> None:
    """Every TP rank draws its slice of `expected`, and zero where it is padded."""
    for rank in range(tp):
        local = localise(parameter, Layout(tp=tp), rank)
        drawn = draw(local, seed)
        part = expected[inside(local)]
        assert drawn.shape == local.shape
        box = tuple(slice(0, n) for n in part.shape)
        assert torch.equal(drawn[box], part), (parameter.name, tp, rank)
        drawn[box] = 0
        assert not drawn.any()


# The same under every layout


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_every_rank_draws_its_slice_of_the_whole(tp: int) -> None:
    """R42: rows, columns, copied KV heads, padded vocabulary, norms and biases, across blocks (a block is 65,536)."""
    parameters = decoder(SPEC).parameters.values()
    assert max(p.numel for p in parameters) > BLOCK_NUMEL
    for parameter in parameters:
        assert_slices(parameter, tp, whole(parameter, seed=3), seed=3)


def test_a_stage_draws_what_the_model_draws() -> None:
    """R42: a value depends on the name of its parameter, which is the same on any stage and with any split."""
    blueprint = decoder(SPEC)
    alone = {p.name: whole(p) for unit in blueprint.units for p in unit.parameters}
    for pp in (2, 4):
        for stage in range(pp):
            for unit in blueprint.stage(Layout(pp=pp), stage):
                for p in unit.parameters:
                    assert torch.equal(draw(localise(p, Layout(pp=pp), 0), 0), alone[p.name])


def test_a_tied_weight_starts_alike_on_both_of_its_stages() -> None:
    """R21, R24: it is drawn twice and never sent."""
    blueprint, layout = decoder(replace(SPEC, tied=True)), Layout(tp=2, pp=2)
    first, last = blueprint.stage(layout, 0)[0].parameters[0], blueprint.stage(layout, 1)[-1].parameters[-1]
    assert (first.role, last.role) == ("embedding", "head")
    for rank in range(2):
        copies = [draw(localise(parameter, layout, rank), 5) for parameter in (first, last)]
        assert torch.equal(*copies)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 12),
    cut=st.sampled_from([0, 1]),
    tp=st.integers(1, 5),
    block=st.integers(16, 100),
    blocks_at_once=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_slices_of_any_shape_with_blocks_of_any_size(
    rows: int, columns: int, cut: int, tp: int, block: int, blocks_at_once: int
) -> None:
    """R42: wherever the boundaries of blocks and of the stretches drawn at once fall, inside rows or between."""
    parameter = matrix(rows, columns, cut=cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "BLOCK_NUMEL", block)
        patch.setattr(random, "DRAW_NUMEL", rows * columns * block)
        expected = whole(parameter)
        patch.setattr(random, "DRAW_NUMEL", blocks_at_once * block)
        assert_slices(parameter, tp, expected)


@pytest.mark.parametrize("stretch", [1, 1000, BLOCK_NUMEL, 3 * BLOCK_NUMEL + 1])
def test_how_much_is_drawn_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch, stretch: int) -> None:
    parameter = matrix(40, 5000)
    expected = whole(parameter)
    monkeypatch.setattr(random, "DRAW_NUMEL", stretch)
    assert torch.equal(whole(parameter), expected)


def test_an_element_depends_on_its_place_and_not_on_the_shape() -> None:
    """The first elements of a longer parameter are those of a shorter one, in one dimension, two or three."""
    n = 3 * BLOCK_NUMEL
    flat = whole(matrix(n))
    assert torch.equal(whole(matrix(n // 48, 48)).flatten(), flat)
    assert torch.equal(whole(matrix(n // 48, 6, 8)).flatten(), flat)
    for shorter in (1, 5, 16, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, n - 7):
        assert torch.equal(whole(matrix(shorter)), flat[:shorter])


def test_an_empty_box_is_all_padding() -> None:
    """R66: a vocabulary of 5 over 4 ranks leaves nothing for the last."""
    local = localise(matrix(5, 3, cut=0), Layout(tp=4), 3)
    assert local.box == ((5, 5), (0, 3))
    assert torch.equal(draw(local, 0), torch.zeros(2, 3))


def test_fixed_values_fill_the_box_and_not_the_padding() -> None:
    ones = Parameter(name="w", role="w", shape=(5,), cut=0, fill=1.0)
    values = [draw(localise(ones, Layout(tp=2), rank), 0).tolist() for rank in range(2)]
    assert values == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]


def test_values_are_fp32_on_the_cpu_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    torch.manual_seed(1)
    first = whole(matrix(10, 10))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(whole(matrix(10, 10)), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert (first.dtype, first.device.type) == (torch.float32, "cpu")
    torch.set_rng_state(before)


# Different where it should be


def test_seeds_names_and_blocks_give_unrelated_values() -> None:
    n = BLOCK_NUMEL
    long = whole(matrix(3 * n))
    draws = [
        *(long[at : at + n] for at in range(0, 3 * n, n)),
        whole(matrix(n), seed=1),
        whole(matrix(n), seed=2**63 - 1),
        whole(matrix(n, name="layers.1.q.weight")),
        whole(matrix(n, name="layers.11.q.weight")),
        whole(matrix(n, name="layers.1.k.weight")),
    ]
    for a, b in combinations(draws, 2):
        assert not torch.equal(a, b)
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
        assert abs(correlation) < 5 / sqrt(n)


def test_no_two_parameters_of_a_model_start_alike() -> None:
    """R42: layers differ, and so do the projections of a layer."""
    values = [whole(p).flatten() for p in decoder(SPEC).parameters.values() if p.std is not None]
    assert all(not torch.equal(a[:200], b[:200]) for a, b in combinations(values, 2))


# The distribution


@pytest.mark.parametrize("std", [1.0, 0.02])
def test_values_are_normal_with_the_declared_deviation(std: float) -> None:
    """Five standard errors of each moment, over a million elements."""
    n = 1 << 20
    values = whole(matrix(n // 128, 128, std=std)).double().flatten() / std
    assert abs(values.mean()) < 5 / sqrt(n)
    assert abs(values.std() - 1) < 5 / sqrt(2 * n)
    assert abs((values**3).mean()) < 5 * sqrt(15 / n)
    assert abs((values**4).mean() - 3) < 5 * sqrt(96 / n)
    for sigmas, share in ((1, 0.6826895), (2, 0.9544997), (3, 0.9973002)):
        inside = (values.abs() < sigmas).double().mean()
        assert abs(inside - share) < 5 * sqrt(share * (1 - share) / n)


def test_the_deviation_scales_the_same_values() -> None:
    torch.testing.assert_close(whole(matrix(64, 64, std=0.5)), whole(matrix(64, 64)) / 2, rtol=1e-6, atol=0)


# Regression


def test_the_values_of_today_are_those_of_tomorrow() -> None:
    """R42: the signs of elements around a block's boundary, and a few values; a change breaks every old experiment.

    Signs and not bits, since the last bit of a logarithm is the processor's own affair.
    """
    values = whole(matrix(3000, 48, name="layers.1.gate.weight", std=0.02), seed=1234).flatten()
    torch.testing.assert_close(
        values[[0, 1, 2, -1]],
        torch.tensor([-0.01169204, -0.00025864, 0.03014346, 0.03216936]),
        rtol=1e-5,
        atol=1e-7,
    )
    around = values[BLOCK_NUMEL - 2048 : BLOCK_NUMEL + 2048]
    assert around.abs().min() > 1e-6
    signs = bytes((around > 0).to(torch.uint8).tolist())
    assert hashlib.sha256(signs).hexdigest() == "5f3e40321197f5de1907b0df50f25b8314407d012946660d12160203a6733c98"
