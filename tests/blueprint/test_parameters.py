"""The slice of a parameter on each TP rank: coverage, padding, copies, ownership and the group that sums gradients."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint import decoder
from trigrid.blueprint.parameters import LocalParameter, Parameter, localise
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec


@st.composite
def cut_parameters(draw: st.DrawFn) -> tuple[Parameter, Layout]:
    """A parameter in any of the ways it can be cut, and a layout that it fits."""
    tp, other = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["whole", "rows", "pieces", "copied"]))
    cut, pieces, size = draw(st.integers(0, 1)), 0, draw(st.integers(1, 20))
    if kind == "pieces":
        pieces = tp * draw(st.integers(1, 3))
    elif kind == "copied":
        pieces = draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0]))
    if pieces:
        size = pieces * draw(st.integers(1, 3))
    parameter = Parameter(
        name="w",
        role="w",
        shape=(size, other) if cut == 0 else (other, size),
        cut=None if kind == "whole" else cut,
        pieces=pieces,
        partial=draw(st.sampled_from(["always", "sequence"])),
    )
    return parameter, Layout(tp=tp, sequence_parallel=draw(st.booleans()))


def slices(parameter: Parameter, layout: Layout) -> list[LocalParameter]:
    return [localise(parameter, layout, rank) for rank in range(layout.tp)]


def covered(local: LocalParameter) -> list[tuple[int, ...]]:
    """Every global element of the box of `local`."""
    return list(product(*(range(*ends) for ends in local.box)))


@given(cut_parameters())
@settings(max_examples=40, deadline=None)
def test_the_boxes_of_all_ranks_cover_each_element_once_per_copy(case: tuple[Parameter, Layout]) -> None:
    parameter, layout = case
    locals_ = slices(parameter, layout)
    counts = Counter(element for local in locals_ for element in covered(local))
    (copies,) = {local.copies for local in locals_}
    assert counts == dict.fromkeys(product(*map(range, parameter.shape)), copies)


@given(cut_parameters())
@settings(max_examples=40, deadline=None)
def test_owned_boxes_hold_each_element_once(case: tuple[Parameter, Layout]) -> None:
    """R16: a sum over the owned boxes of all TP ranks counts each logical element exactly once."""
    parameter, layout = case
    owned = Counter(element for local in slices(parameter, layout) if local.owned for element in covered(local))
    assert owned.total() == parameter.numel
    assert set(owned.values()) == {1}


@given(cut_parameters())
@settings(max_examples=40, deadline=None)
def test_every_rank_has_the_same_shape_and_only_rows_are_padded(case: tuple[Parameter, Layout]) -> None:
    """R66: also where there are fewer rows than ranks, so that some ranks hold nothing but padding."""
    parameter, layout = case
    locals_ = slices(parameter, layout)
    (shape,) = {local.shape for local in locals_}
    assert all(local.numel == prod(shape) > 0 for local in locals_)
    for local in locals_:
        extents = tuple(stop - start for start, stop in local.box)
        assert all(0 <= start <= stop <= n for (start, stop), n in zip(local.box, parameter.shape, strict=True))
        assert all(
            extent == size or (d == parameter.cut and parameter.pieces == 0 and extent < size)
            for d, (extent, size) in enumerate(zip(extents, shape, strict=True))
        )
    if parameter.cut is not None and parameter.pieces == 0:
        padding = shape[parameter.cut] * layout.tp - parameter.shape[parameter.cut]
        assert 0 <= padding < layout.tp


@given(cut_parameters())
@settings(max_examples=40, deadline=None)
def test_pieces_are_never_cut(case: tuple[Parameter, Layout]) -> None:
    """A head lies on one rank as a whole."""
    parameter, layout = case
    if parameter.cut is not None and parameter.pieces:
        piece = parameter.shape[parameter.cut] // parameter.pieces
        for local in slices(parameter, layout):
            start, stop = local.box[parameter.cut]
            assert start % piece == stop % piece == 0
            assert stop > start


@given(cut_parameters())
@settings(max_examples=40, deadline=None)
def test_gradients_are_summed_over_exactly_the_copies_that_are_partial(case: tuple[Parameter, Layout]) -> None:
    """R38: what follows from the declaration alone, equal on every TP rank."""
    parameter, layout = case
    locals_ = slices(parameter, layout)
    (group,) = {local.sum_group for local in locals_}
    if parameter.cut is not None:
        assert group == ("kv" if locals_[0].copies > 1 else "none")
    elif layout.tp == 1:
        assert group == "none"
    else:
        assert locals_[0].copies == layout.tp
        assert group == ("tp" if parameter.partial == "always" or layout.sequence_parallel else "none")


@pytest.mark.parametrize(
    ("vocab", "tp", "rows", "spans"),
    [
        (5, 4, 2, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (1, 4, 1, [(0, 1), (1, 1), (1, 1), (1, 1)]),
        (31, 4, 8, [(0, 8), (8, 16), (16, 24), (24, 31)]),
        (50257, 2, 25129, [(0, 25129), (25129, 50257)]),
        (151669, 4, 37918, [(0, 37918), (37918, 75836), (75836, 113754), (113754, 151669)]),
        (8, 4, 2, [(0, 2), (2, 4), (4, 6), (6, 8)]),
    ],
)
def test_a_vocabulary_is_padded_to_a_multiple_of_tp(vocab: int, tp: int, rows: int, spans: list[object]) -> None:
    """R34: the box tells vocabulary from padding on each rank, and may be empty."""
    spec = ModelSpec(name="v", hidden=4, layers=1, heads=4, kv_heads=4, head_dim=2, ffn=8, vocab=vocab, context=8)
    for name in ("embedding.weight", "head.weight"):
        locals_ = slices(decoder(spec).parameters[name], Layout(tp=tp))
        assert [local.box for local in locals_] == [(span, (0, 4)) for span in spans]
        assert {local.shape for local in locals_} == {(rows, 4)}
        assert all(local.owned and local.copies == 1 and local.sum_group == "none" for local in locals_)


@pytest.mark.parametrize(
    ("tp", "heads_of_rank", "copies", "owners", "group"),
    [
        (1, [(0, 2)], 1, [0], "none"),
        (2, [(0, 1), (1, 2)], 1, [0, 1], "none"),
        (4, [(0, 1), (0, 1), (1, 2), (1, 2)], 2, [0, 2], "kv"),
        (8, [(0, 1)] * 4 + [(1, 2)] * 4, 4, [0, 4], "kv"),
    ],
)
def test_two_kv_heads(
    tp: int, heads_of_rank: list[tuple[int, int]], copies: int, owners: list[int], group: str
) -> None:
    """R36: neighbouring ranks share a KV head, namely the one that their own query heads attend to."""
    spec = ModelSpec(
        name="gqa", hidden=12, layers=1, heads=8, kv_heads=2, head_dim=6, ffn=8, vocab=8, context=8, qkv_bias=True
    )
    parameters = decoder(spec).parameters
    for role in ("k", "v"):
        for name, columns in ((f"{role}.weight", [(0, 12)]), (f"{role}.bias", [])):
            locals_ = slices(parameters[f"layers.0.{name}"], Layout(tp=tp))
            assert [local.box for local in locals_] == [((6 * a, 6 * b), *columns) for a, b in heads_of_rank]
            assert {(local.copies, local.sum_group) for local in locals_} == {(copies, group)}
            assert [rank for rank, local in enumerate(locals_) if local.owned] == owners
    for rank in range(tp):
        (first, last), _ = localise(parameters["layers.0.q.weight"], Layout(tp=tp), rank).box
        queries = range(first // 6, last // 6)
        assert {query // 4 for query in queries} == set(range(*heads_of_rank[rank]))


@pytest.mark.parametrize(
    ("name", "with_sequence_parallel", "without"),
    [
        ("layers.0.attention_norm.weight", "tp", "none"),
        ("layers.0.ffn_norm.weight", "tp", "none"),
        ("final_norm.weight", "tp", "none"),
        ("layers.0.q_norm.weight", "tp", "tp"),
        ("layers.0.k_norm.weight", "tp", "tp"),
        ("layers.0.q.weight", "none", "none"),
        ("layers.0.o.weight", "none", "none"),
        ("layers.0.down.weight", "none", "none"),
        ("embedding.weight", "none", "none"),
    ],
)
def test_which_gradients_of_a_llama_are_partial(name: str, with_sequence_parallel: str, without: str) -> None:
    """R38: norms see part of the sequence under sequence parallelism, head norms part of the heads in any case."""
    spec = ModelSpec(
        name="q", hidden=8, layers=1, heads=4, kv_heads=4, head_dim=4, ffn=8, vocab=8, context=8, qk_norm=True
    )
    parameter = decoder(spec).parameters[name]
    for sequence_parallel, expected in ((True, with_sequence_parallel), (False, without)):
        for rank in range(2):
            local = localise(parameter, Layout(tp=2, sequence_parallel=sequence_parallel), rank)
            assert local.sum_group == expected
            assert localise(parameter, Layout(tp=1, sequence_parallel=sequence_parallel), 0).sum_group == "none"


def test_a_model_is_cut_where_megatron_cuts_it() -> None:
    """Columns of the projections into a block's halves, rows of those out of them; biases after a sum stay whole."""
    spec = ModelSpec(
        name="g", hidden=8, layers=1, heads=4, kv_heads=4, head_dim=2, ffn=16, vocab=8, context=6, block="gpt"
    )
    shapes = {n: localise(p, Layout(tp=4), 1).shape for n, p in decoder(spec).parameters.items()}
    assert shapes["layers.0.q.weight"] == (2, 8)
    assert shapes["layers.0.v.bias"] == (2,)
    assert shapes["layers.0.o.weight"] == (8, 2)
    assert shapes["layers.0.o.bias"] == (8,)
    assert shapes["layers.0.up.weight"] == (4, 8)
    assert shapes["layers.0.up.bias"] == (4,)
    assert shapes["layers.0.down.weight"] == (8, 4)
    assert shapes["layers.0.down.bias"] == (8,)
    assert shapes["positions.weight"] == (6, 8)
    assert shapes["embedding.weight"] == (2, 8)
