"""Ranges of a bucket as boxes of global parameters: none missing, none twice, each where it says."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

from helpers.jobs import named, small_job
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint import decoder
from trigrid.blueprint.boxes import boxes, replica_share, row_major, written
from trigrid.blueprint.buckets import job_buckets
from trigrid.grid import Grid

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@given(shape=shapes, data=st.data())
def test_boxes_are_the_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    strides = row_major(shape)
    seen: list[int] = []
    for offsets, sizes in boxes(shape, start, stop):
        assert all(size > 0 and at + size <= n for at, size, n in zip(offsets, sizes, shape, strict=True))
        places = product(*(range(at, at + size) for at, size in zip(offsets, sizes, strict=True)))
        seen += [sum(i * stride for i, stride in zip(place, strides, strict=True)) for place in places]
    assert seen == list(range(start, stop)), "in order, each once"
    assert len(list(boxes(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


@given(start=st.integers(0, 50), length=st.integers(0, 50), replicas=st.integers(1, 9))
def test_replicas_share_a_range(start: int, length: int, replicas: int) -> None:
    shares = [replica_share(start, start + length, r, replicas) for r in range(replicas)]
    assert [i for low, high in shares for i in range(low, high)] == list(range(start, start + length))
    assert max(high - low for low, high in shares) - min(high - low for low, high in shares) <= 1


@settings(deadline=None, max_examples=40)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.integers(1, 2),
    shards=st.integers(1, 5),
    replicas=st.integers(1, 3),
    tied=st.booleans(),
    bucket_numel=st.sampled_from([0, 5_000]),
)
def test_ranks_write_every_element_once(
    tp: int, pp: int, shards: int, replicas: int, tied: bool, bucket_numel: int
) -> None:
    """Over all ranks, what is owned covers each element of each parameter exactly once, whatever the layout."""
    layout = named("", tp=tp, pp=pp, dp=shards * replicas, dp_replicate=replicas, zero=1, bucket_numel=bucket_numel)
    job = small_job(layout, tied=tied, hidden=8, head_dim=2, ffn=8, vocab=13)
    grid = Grid(layout)
    found: dict[str, Counter[tuple[int, ...]]] = {}
    for rank in range(layout.world):
        at = grid.coord(rank)
        shard, replica = grid.group("zero", rank).index(rank), grid.group("replicate", rank).index(rank)
        for bucket in job_buckets(job, at.pp, at.tp)[0].values():
            for piece in written(bucket, at.pp, shard, replica, replicas):
                spans = (range(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))
                found.setdefault(piece.parameter.name, Counter()).update(product(*spans))
    parameters = decoder(job.model).parameters
    assert found.keys() == parameters.keys()
    for name, counts in found.items():
        assert set(counts.values()) == {1}, name
        assert len(counts) == parameters[name].numel, name
