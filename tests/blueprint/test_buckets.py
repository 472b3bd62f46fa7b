"""The flat layout of buckets: entries, runs, shards, and that what must agree between ranks does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint import Unit, decoder
from trigrid.blueprint.buckets import BucketLayout, Run, UnitBuckets, lay_out, rank_buckets
from trigrid.blueprint.parameters import LocalParameter, Parameter, localise
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

# Awkward on purpose: a vocabulary that leaves a TP rank empty, fewer KV heads than TP ranks, biases, head norms.
LLAMA = ModelSpec(
    name="llama",
    hidden=6,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=2,
    ffn=8,
    vocab=5,
    context=8,
    qkv_bias=True,
    qk_norm=True,
)
GPT = replace(LLAMA, name="gpt", block="gpt", kv_heads=4, qkv_bias=False, qk_norm=False)


@st.composite
def buckets(draw: st.DrawFn) -> BucketLayout:
    """A bucket of parameters cut in any way, with any mixture of decay and sum groups."""
    tp = draw(st.sampled_from([1, 2, 4]))
    layout = Layout(tp=tp, sequence_parallel=draw(st.booleans()))
    tp_rank, locals_ = draw(st.integers(0, tp - 1)), []
    for i in range(draw(st.integers(1, 8))):
        pieces = draw(st.sampled_from([0, *(d for d in (1, 2, 4, 8) if tp % d == 0 or d % tp == 0)]))
        parameter = Parameter(
            name=f"p{i}",
            role=f"p{i}",
            shape=(draw(st.integers(1, 3)) * max(pieces, 1), draw(st.integers(1, 4))),
            cut=draw(st.sampled_from([None, 0])),
            pieces=pieces,
            partial=draw(st.sampled_from(["always", "sequence"])),
            decay=draw(st.booleans()),
        )
        locals_.append(localise(parameter, layout, tp_rank))
    return lay_out("b", locals_, draw(st.integers(1, 9)))


def stage_buckets(
    units: Sequence[Unit], layout: Layout, tp_rank: int
) -> tuple[dict[str, BucketLayout], tuple[UnitBuckets, ...]]:
    found, places = rank_buckets({0: units}, layout, tp_rank)
    return found, places[0]


def shape_of(bucket: BucketLayout) -> object:
    """Everything about a bucket that must agree between the ranks that exchange it: all but who owns what."""
    return (
        bucket.name,
        bucket.numel,
        bucket.shards,
        bucket.tied,
        [(e.offset, e.stop, e.local.parameter.name, e.local.shape, e.local.sum_group) for e in bucket.entries],
        [(r.start, r.stop, r.decay, r.sum_group) for r in bucket.runs],
    )


def by_position(runs: Iterable[Run]) -> list[tuple[object, ...]]:
    return [(at, r.decay, r.sum_group, r.owned) for r in runs for at in range(r.start, r.stop)]


def treatment(local: LocalParameter) -> tuple[object, ...]:
    return local.parameter.decay, local.sum_group, local.owned


# One bucket


@given(buckets())
@settings(max_examples=30, deadline=None)
def test_entries_lie_one_after_another_each_once(bucket: BucketLayout) -> None:
    assert bucket.entries[0].offset == 0
    assert all(before.stop == after.offset for before, after in pairwise(bucket.entries))
    names = [entry.local.parameter.name for entry in bucket.entries]
    assert len(set(names)) == len(names)
    assert 0 <= bucket.numel - bucket.entries[-1].stop < bucket.shards
    assert bucket.numel == bucket.shard_numel * bucket.shards


@given(buckets())
@settings(max_examples=30, deadline=None)
def test_runs_cover_the_entries_once_and_treat_each_as_it_declares(bucket: BucketLayout) -> None:
    """R16, R70: every element of every entry lies in exactly one run, alike in decay, sum group and ownership."""
    assert bucket.runs[0].start == 0
    assert bucket.runs[-1].stop == bucket.entries[-1].stop
    assert all(before.stop == after.start for before, after in pairwise(bucket.runs))
    for entry in bucket.entries:
        (run,) = (run for run in bucket.runs if run.start <= entry.offset < run.stop)
        assert entry.stop <= run.stop
        assert (run.decay, run.sum_group, run.owned) == treatment(entry.local)


@given(buckets())
@settings(max_examples=30, deadline=None)
def test_the_same_treatment_is_one_stretch(bucket: BucketLayout) -> None:
    """Weight decay and sums over TP are a few slices of a shard, however many parameters there are."""
    kinds = {(e.local.parameter.decay, e.local.sum_group, e.local.copies) for e in bucket.entries}
    assert len(bucket.runs) == len(kinds)
    decays = [run.decay for run in bucket.runs]
    assert decays == sorted(decays)


@given(buckets())
@settings(max_examples=30, deadline=None)
def test_the_runs_of_all_shards_are_the_runs_of_the_bucket(bucket: BucketLayout) -> None:
    """R66: also where a bucket has fewer elements than shards, so that some shards are padding only."""
    joined = []
    for shard in range(bucket.shards):
        start = shard * bucket.shard_numel
        runs = bucket.shard_runs(shard)
        assert all(start <= run.start < run.stop <= start + bucket.shard_numel for run in runs)
        assert len(runs) <= len(bucket.runs)
        joined += by_position(runs)
    assert joined == by_position(bucket.runs)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 4, None), (8, 12, None), (0, 5, (4, 5)), (5, 7, (5, 7)), (7, 20, (7, 8)), (0, 20, (4, 8)), (4, 8, (4, 8))],
)
def test_the_part_of_a_run_inside_a_span(start: int, stop: int, expected: tuple[int, int] | None) -> None:
    run = Run(4, 8, decay=True, sum_group="kv", owned=False)
    assert run.within(start, stop) == (expected and Run(*expected, decay=True, sum_group="kv", owned=False))


def test_a_bucket_in_full() -> None:
    """Norm (TP sum), bias, two matrices and a copied key, cut into four shards of five elements."""
    layout = Layout(tp=2)
    parameters = [
        Parameter(name="w", role="w", shape=(4, 2), cut=0, pieces=4),
        Parameter(name="norm", role="norm", shape=(3,), decay=False),
        Parameter(name="key", role="key", shape=(2, 2), cut=0, pieces=1),
        Parameter(name="bias", role="bias", shape=(4,), cut=0, pieces=4, decay=False),
        Parameter(name="o", role="o", shape=(2, 4), cut=1, pieces=4),
    ]
    bucket = lay_out("b", [localise(p, layout, 1) for p in parameters], 4)
    places = [(e.local.parameter.name, e.offset, e.stop) for e in bucket.entries]
    assert places == [("bias", 0, 2), ("norm", 2, 5), ("key", 5, 9), ("w", 9, 13), ("o", 13, 17)]
    assert (bucket.numel, bucket.shard_numel) == (20, 5)
    assert bucket.runs == (
        Run(0, 2, False, "none", True),
        Run(2, 5, False, "tp", False),
        Run(5, 9, True, "kv", False),
        Run(9, 17, True, "none", True),
    )
    assert bucket.shard_runs(1) == (Run(5, 9, True, "kv", False), Run(9, 10, True, "none", True))
    assert bucket.shard_runs(3) == (Run(15, 17, True, "none", True),)


# The buckets of a stage


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_each_unit_finds_its_parameters(pp: int, tied: bool) -> None:
    """One bucket per unit, and one for the tied weight, which with one stage is there once and found twice."""
    blueprint, layout = decoder(replace(LLAMA, tied=tied)), Layout(tp=2, pp=pp)
    for stage in range(pp):
        units = blueprint.stage(layout, stage)
        found, places = stage_buckets(units, layout, 1)
        assert [place.unit for place in places] == list(units)
        for place in places:
            held = [found[bucket].entries[index].local for bucket, index in place.places]
            assert [local.parameter.name for local in held] == [p.name for p in place.unit.parameters]
            assert all(
                replace(local, parameter=p) == localise(p, layout, 1)
                for local, p in zip(held, place.unit.parameters, strict=True)
            )
            expected = ["tied" if p.tied else place.unit.name for p in place.unit.parameters]
            assert [bucket for bucket, _ in place.places] == expected
        used = {bucket for place in places for bucket, _ in place.places}
        assert used == found.keys()
        assert {name for name, bucket in found.items() if bucket.tied} == ({"tied"} & found.keys())
        entries = [e.local.parameter.name for bucket in found.values() for e in bucket.entries]
        assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("spec", [LLAMA, GPT], ids=lambda s: s.name)
@pytest.mark.parametrize(("pp", "dp", "replicas"), [(2, 1, 1), (2, 3, 1), (3, 4, 2)])
def test_the_tied_bucket_is_cut_alike_on_both_of_its_stages(spec: ModelSpec, pp: int, dp: int, replicas: int) -> None:
    """R21: the sum between first and last stage is made on shards, so the same shard must hold the same elements."""
    blueprint, layout = decoder(replace(spec, tied=True)), Layout(tp=2, pp=pp, dp=dp, dp_replicate=replicas)
    for tp_rank in range(2):
        first, last = (
            stage_buckets(blueprint.stage(layout, stage), layout, tp_rank)[0]["tied"] for stage in (0, pp - 1)
        )
        assert shape_of(first) == shape_of(last)
        assert first.runs == last.runs
        assert [e.local.box for e in first.entries] == [e.local.box for e in last.entries]
    for stage in range(1, pp - 1):
        assert "tied" not in stage_buckets(blueprint.stage(layout, stage), layout, 0)[0]


@pytest.mark.parametrize("spec", [LLAMA, replace(LLAMA, kv_heads=1), GPT, replace(GPT, tied=True)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_tp_rank_has_the_same_layout(spec: ModelSpec, sequence_parallel: bool, tp: int) -> None:
    """R38: sums over TP add the same elements, though ranks own different parts and may hold only padding."""
    layout = Layout(tp=tp, pp=2, dp=3, sequence_parallel=sequence_parallel)
    for stage in range(2):
        units = decoder(spec).stage(layout, stage)
        ranks = [stage_buckets(units, layout, rank) for rank in range(tp)]
        first, places = ranks[0]
        for found, found_places in ranks[1:]:
            assert found_places == places
            assert {n: shape_of(b) for n, b in found.items()} == {n: shape_of(b) for n, b in first.items()}


def test_shards_are_cut_over_the_replica_and_context_ranks_only() -> None:
    """HSDP: copies of a shard are not cut further."""
    layout = Layout(tp=2, cp=3, dp=4, dp_replicate=2)
    found, _ = stage_buckets(decoder(LLAMA).units, layout, 0)
    assert {bucket.shards for bucket in found.values()} == {2 * 3}


def elements(bucket: BucketLayout) -> list[tuple[str, tuple[int, ...]] | None]:
    """What lies at each position of a bucket: a global element of a parameter, or padding."""
    at: list[tuple[str, tuple[int, ...]] | None] = [None] * bucket.numel
    for entry in bucket.entries:
        starts = [start for start, _ in entry.local.box]
        extents = [stop - start for start, stop in entry.local.box]
        for position, index in enumerate(product(*map(range, entry.local.shape)), entry.offset):
            if all(i < extent for i, extent in zip(index, extents, strict=True)):
                at[position] = (
                    entry.local.parameter.name,
                    tuple(s + i for s, i in zip(starts, index, strict=True)),
                )
    return at


@pytest.mark.parametrize("spec", [LLAMA, replace(LLAMA, tied=True), replace(LLAMA, kv_heads=1), GPT])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=4),
        Layout(tp=4, sequence_parallel=False),
        Layout(pp=3, dp=2),
        Layout(tp=2, pp=2, dp=7),
        Layout(tp=4, pp=2, dp=4, dp_replicate=2, cp=2),
    ],
    ids=lambda x: f"tp{x.tp}pp{x.pp}dp{x.dp}cp{x.cp}" if isinstance(x, Layout) else None,
)
def test_over_all_ranks_owned_runs_hold_each_element_of_the_model_once(spec: ModelSpec, layout: Layout) -> None:
    """R14, R16: what the norm sums over TP ranks, stages and shards, a tied weight on the first of its stages only."""
    blueprint = decoder(spec)
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    tied_seen: set[int] = set()
    for stage, tp_rank in product(range(layout.pp), range(layout.tp)):
        found, _ = stage_buckets(blueprint.stage(layout, stage), layout, tp_rank)
        for bucket in found.values():
            if bucket.tied and tp_rank in tied_seen:
                continue
            tied_seen |= {tp_rank} if bucket.tied else set()
            at = elements(bucket)
            for shard in range(bucket.shards):
                for run in bucket.shard_runs(shard):
                    if run.owned:
                        counts.update(element for element in at[run.start : run.stop] if element is not None)
    assert counts.total() == blueprint.count
    assert set(counts.values()) == {1}
