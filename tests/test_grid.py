"""Ranks, coordinates, groups by meaning against brute-force definitions, tiers and the golden rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint import decoder
from trigrid.blueprint.parameters import localise
from trigrid.grid import Coord, Grid, golden_rules
from trigrid.spec.cluster import Cluster, Tier
from trigrid.spec.layout import AXES, Axis, Layout
from trigrid.spec.model import ModelSpec

NAMES = ("tp", "cp", "pp", "dp", "zero", "replicate", "batch", "kv", "tied", "world")
CLUSTER = Cluster(gpus_per_node=4, nodes_per_leaf=2)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp, pp, cp, shards, replicas = (draw(st.integers(1, high)) for high in (6, 4, 3, 3, 3))
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=shards * replicas,
        dp_replicate=replicas,
        order=tuple(draw(st.permutations(AXES))),
    )
    cluster = Cluster(gpus_per_node=draw(st.integers(1, 9)), nodes_per_leaf=draw(st.integers(1, 4)))
    return Grid(layout, cluster, draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0])))


def brute_force(grid: Grid, key: Callable[[Coord], object]) -> dict[object, tuple[int, ...]]:
    """The definition of a kind of group: the ranks whose coordinates have the same `key`, by coordinate."""
    found: dict[object, tuple[int, ...]] = {}
    for coord in sorted(grid.coord(rank) for rank in range(grid.world)):
        found[key(coord)] = (*found.get(key(coord), ()), grid.rank(coord))
    return found


# Ranks and coordinates


@pytest.mark.parametrize("order", list(permutations(AXES)), ids=" ".join)
def test_ranks_count_through_the_axes_slowest_first(order: tuple[Axis, ...]) -> None:
    grid = Grid(Layout(tp=2, pp=3, cp=2, dp=5, order=order))
    odometer = product(*(range(grid.layout.degree(axis)) for axis in order))
    for rank, places in enumerate(odometer):
        coord = Coord(**dict(zip(order, places, strict=True)))
        assert grid.coord(rank) == coord
        assert grid.rank(coord) == rank
    assert rank == grid.world - 1 == 59


@given(grids())
@settings(max_examples=50, deadline=None)
def test_rank_and_coordinate_are_a_bijection(grid: Grid) -> None:
    coords = [grid.coord(rank) for rank in range(grid.world)]
    degrees = Coord(*(grid.layout.degree(axis) for axis in AXES))
    assert len(set(coords)) == grid.world
    assert all(0 <= at < degree for coord in coords for at, degree in zip(coord, degrees, strict=True))
    assert [grid.rank(coord) for coord in coords] == list(range(grid.world))


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_there_is_no_coordinate_outside_the_world(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} of a world of 8"):
        Grid(Layout(tp=4, dp=2)).coord(rank)


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(KeyError, match="no group is called 'ep'"):
        Grid(Layout()).group("ep", 0)


# Groups


@given(grids())
@settings(max_examples=25, deadline=None)
def test_every_named_group_partitions_the_world_in_order_of_coordinates(grid: Grid) -> None:
    for name in NAMES:
        groups = grid.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world))
        for group in groups:
            coords = [grid.coord(rank) for rank in group]
            assert name == "world" or coords == sorted(coords)
            assert {grid.group(name, rank) for rank in group} == {group}


@given(grids())
@settings(max_examples=25, deadline=None)
def test_groups_are_what_their_meaning_says(grid: Grid) -> None:
    shards, copies = grid.layout.dp_shard, grid.kv_copies
    meaning: dict[str, Callable[[Coord], object]] = {
        "tp": lambda c: (c.dp, c.pp, c.cp),
        "cp": lambda c: (c.dp, c.pp, c.tp),
        "pp": lambda c: (c.dp, c.cp, c.tp),
        "dp": lambda c: (c.pp, c.cp, c.tp),
        "zero": lambda c: (c.pp, c.tp, c.dp // shards),
        "replicate": lambda c: (c.pp, c.tp, c.cp, c.dp % shards),
        "batch": lambda c: (c.pp, c.tp),
        "kv": lambda c: (c.dp, c.pp, c.cp, c.tp // copies),
    }
    for name, key in meaning.items():
        expected = brute_force(grid, key)
        for rank in range(grid.world):
            assert grid.group(name, rank) == expected[key(grid.coord(rank))], (name, rank)
    assert grid.group("world", 0) == tuple(range(grid.world))


@given(grids())
@settings(max_examples=20, deadline=None)
def test_shards_and_their_copies_make_up_the_batch(grid: Grid) -> None:
    """A ZeRO group holds each shard once; the ranks of a replicate group hold the same shard, each of its replica."""
    layout = grid.layout
    for rank in range(grid.world):
        zero, replicate = grid.group("zero", rank), grid.group("replicate", rank)
        assert (len(zero), len(replicate)) == (layout.dp_shard * layout.cp, layout.dp_replicate)
        assert set(zero) & set(replicate) == {rank}
        shard = zero.index(rank)
        assert all(grid.group("zero", copy).index(copy) == shard for copy in replicate)
        assert {r for copy in replicate for r in grid.group("zero", copy)} == set(grid.group("batch", rank))


def test_the_zero_group_is_the_nearer_part_of_dp() -> None:
    grid = Grid(Layout(tp=2, dp=8, dp_replicate=2), CLUSTER)
    assert grid.group("zero", 0) == (0, 2, 4, 6)
    assert grid.group("replicate", 0) == (0, 8)


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 4), (2, 4), (2, 8), (4, 4), (8, 2)])
def test_the_kv_group_is_the_ranks_that_hold_the_same_head(kv_heads: int, tp: int) -> None:
    """R36: with fewer KV heads than TP ranks the group over which their gradient is summed is not all of TP."""
    spec = ModelSpec(name="gqa", hidden=16, layers=1, heads=8, kv_heads=kv_heads, head_dim=2, ffn=8, vocab=8, context=8)
    key = decoder(spec).parameters["layers.0.k.weight"]
    layout = Layout(tp=tp, dp=2)
    held = [localise(key, layout, rank) for rank in range(tp)]
    grid = Grid(layout, kv_copies=held[0].copies)
    for rank in range(grid.world):
        here = grid.coord(rank)
        same = [at for at in range(tp) if held[at].box == held[here.tp].box]
        assert grid.group("kv", rank) == tuple(grid.rank(here._replace(tp=at)) for at in same)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_the_tied_group_is_the_stages_that_hold_the_tied_weight(pp: int) -> None:
    spec = ModelSpec(
        name="tied", hidden=8, layers=4, heads=2, kv_heads=2, head_dim=4, ffn=8, vocab=8, context=8, tied=True
    )
    blueprint, layout = decoder(spec), Layout(tp=2, pp=pp, dp=2)
    grid = Grid(layout)
    tied = [any(p.tied for unit in blueprint.stage(layout, s) for p in unit.parameters) for s in range(pp)]
    for rank in range(grid.world):
        line = grid.group("pp", rank)
        holders = tuple(r for r in line if tied[grid.coord(r).pp])
        assert grid.group("tied", rank) == (holders if rank in holders else (rank,))


# Tiers


@pytest.mark.parametrize(
    ("ranks", "tier"),
    [
        ((), Tier.LOCAL),
        ((5,), Tier.LOCAL),
        ((0, 3), Tier.NVLINK),
        ((3, 4), Tier.LEAF),
        ((4, 7), Tier.NVLINK),
        ((0, 7), Tier.LEAF),
        ((7, 8), Tier.SPINE),
        ((0, 1, 2, 8), Tier.SPINE),
        ((8, 9, 12), Tier.LEAF),
    ],
)
def test_the_tier_of_ranks_on_nodes_of_four_and_leaves_of_two(ranks: tuple[int, ...], tier: Tier) -> None:
    assert Grid(Layout(dp=16), CLUSTER).tier(ranks) == tier


@given(grids(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_group_is_as_slow_as_its_slowest_pair(grid: Grid, data: st.DataObject) -> None:
    group = grid.group(data.draw(st.sampled_from(NAMES)), data.draw(st.integers(0, grid.world - 1)))
    assert grid.tier(group) == max((grid.tier(pair) for pair in combinations(group, 2)), default=Tier.LOCAL)


def test_an_axis_is_as_slow_as_its_slowest_group() -> None:
    """TP groups of 3 on nodes of 4: the first lies inside a node, the second does not."""
    grid = Grid(Layout(tp=3, dp=2), CLUSTER)
    assert [grid.tier(group) for group in grid.groups("tp")] == [Tier.NVLINK, Tier.LEAF]
    assert grid.worst_tier("tp") == Tier.LEAF


@given(grids())
@settings(max_examples=40, deadline=None)
def test_a_pipeline_is_as_slow_as_its_slowest_pair_of_neighbours(grid: Grid) -> None:
    neighbours = (pair for line in grid.groups("pp") for pair in pairwise(line))
    assert grid.worst_tier("pp") == max(map(grid.tier, neighbours), default=Tier.LOCAL)


def test_llama_3_405b_maps_each_axis_to_its_network() -> None:
    """16,384 GPUs: TP on NVLink, neighbouring stages under a leaf, data parallelism over the spine."""
    grid = Grid(Layout(tp=8, pp=16, dp=128))
    assert {name: grid.worst_tier(name) for name in ("tp", "pp", "dp")} == {
        "tp": Tier.NVLINK,
        "pp": Tier.LEAF,
        "dp": Tier.SPINE,
    }
    assert golden_rules(grid) == []


# Golden rules


@given(grids())
@settings(max_examples=40, deadline=None)
def test_tensor_parallelism_across_nodes_is_reported_and_only_then(grid: Grid) -> None:
    """R45: a warning wherever a TP group holds ranks of two nodes, whatever the rank order."""
    nodes: dict[Coord, set[int]] = {}
    for rank in range(grid.world):
        nodes.setdefault(grid.coord(rank)._replace(tp=0), set()).add(rank // grid.cluster.gpus_per_node)
    crosses = any(len(held) > 1 for held in nodes.values())
    assert any("tensor-parallel" in problem.reason for problem in golden_rules(grid)) == crosses


def test_the_warning_names_the_node_the_tier_and_the_degrees_that_fit() -> None:
    """R45."""
    (problem,) = golden_rules(Grid(Layout(tp=16, dp=2)))
    assert (problem.key, problem.value, problem.legal) == ("parallel.tp", 16, (2, 4, 8))
    assert "crosses nodes of 8 GPUs (leaf)" in problem.reason


def test_a_rank_order_that_spreads_tp_is_not_blamed_on_its_degree() -> None:
    """R45: TP 2 fits into a node; it is the order that must change, so the way out cannot be `parallel.tp = 2`."""
    (problem,) = golden_rules(Grid(Layout(tp=2, dp=8, order=("tp", "dp", "pp", "cp"))))
    assert (problem.key, problem.legal) == ("parallel.order", ("dp pp cp tp",))
    assert "tensor-parallel" in problem.reason


def test_stages_that_cross_the_spine_in_place_of_data_parallelism_are_reported() -> None:
    order: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
    (problem,) = golden_rules(Grid(Layout(tp=4, pp=2, dp=2, order=order), CLUSTER))
    assert (problem.key, problem.value, problem.legal) == ("parallel.order", "pp dp cp tp", ("dp pp cp tp",))
    assert golden_rules(Grid(Layout(tp=4, pp=2, dp=2), CLUSTER)) == []


def test_stages_that_cross_the_spine_beside_data_parallelism_are_reported_too() -> None:
    """64 replicas do not fit under one leaf in any order; the two stages would."""
    layout = Layout(tp=8, pp=2, dp=64, order=("pp", "dp", "cp", "tp"))
    grid = Grid(layout)
    assert (grid.worst_tier("pp"), grid.worst_tier("dp")) == (Tier.SPINE, Tier.SPINE)
    assert [(p.key, p.legal) for p in golden_rules(grid)] == [("parallel.order", ("dp pp cp tp",))]
    assert golden_rules(Grid(replace(layout, order=AXES))) == []


def test_a_pipeline_longer_than_a_leaf_has_nothing_to_exchange() -> None:
    """With one replica, or in the usual order, another order would not take the stages off the spine."""
    assert golden_rules(Grid(Layout(tp=8, pp=64))) == []
    assert golden_rules(Grid(Layout(tp=8, pp=64, dp=2))) == []


@given(grids())
@settings(max_examples=60, deadline=None)
def test_whoever_does_as_told_is_not_told_again(grid: Grid) -> None:
    """Each way out that a warning offers takes that warning away."""
    for problem in golden_rules(grid):
        assert problem.legal
        for value in problem.legal:
            change = {"order": tuple(str(value).split())} if problem.key == "parallel.order" else {"tp": value}
            mended = Grid(replace(grid.layout, **change), grid.cluster)
            assert problem.key not in {left.key for left in golden_rules(mended)}


# Size


@pytest.mark.parametrize("layout", [Layout(tp=8, pp=16, dp=128), Layout(tp=8, pp=16, cp=8, dp=16, dp_replicate=2)])
def test_sixteen_thousand_ranks_take_no_time(layout: Layout) -> None:
    grid = Grid(layout)
    start = time.process_time()
    golden_rules(grid)
    for name in NAMES:
        grid.group(name, 9999)
    assert time.process_time() - start < 1.5


@pytest.mark.parametrize("name", ["tp", "kv", "zero", "replicate"])
def test_a_group_costs_what_its_members_cost(name: str) -> None:
    """Groups of one rank on an axis of 1,024: walking the axis for each of them would take a million steps."""
    grid = Grid(Layout(dp=1024, dp_replicate=1 if name == "replicate" else 1024))
    start = time.process_time()
    assert grid.groups(name) == [(rank,) for rank in range(1024)]
    assert time.process_time() - start < 0.25


# Picture


def test_the_picture_shows_every_rank_at_its_place() -> None:
    grid = Grid(Layout(tp=2, pp=2, cp=2, dp=2))
    assert grid.picture() == (
        "dp 0  pp 0  tp [ 0  1 |  2  3]\n"
        "dp 0  pp 1  tp [ 4  5 |  6  7]\n"
        "dp 1  pp 0  tp [ 8  9 | 10 11]\n"
        "dp 1  pp 1  tp [12 13 | 14 15]"
    )
