"""Stretches of a flat bucket as boxes of the parameters that lie in it.

A ZeRO shard is a contiguous range of a bucket and may begin and end anywhere in a parameter; a checkpoint stores boxes
of global parameters, which any other layout can read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from trigrid.blueprint.buckets import BucketLayout, Entry
from trigrid.blueprint.parameters import Parameter

Extent = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The box of a parameter from `offsets` on, of `sizes` elements along each dimension.

    start: where its first element lies in the bucket; strides: elements between neighbours along each dimension there.
    """

    parameter: Parameter
    offsets: Extent
    sizes: Extent
    start: int
    strides: Extent

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def pieces(bucket: BucketLayout, start: int, stop: int, owned: bool = False) -> Iterator[Piece]:
    """Elements start..stop of `bucket` as boxes that do not overlap, without padding; `owned`: only of the copies that
    stand for all (`LocalParameter.owned`)."""
    for entry in bucket.entries:
        first, last = max(entry.offset, start), min(entry.stop, stop)
        if first < last and (entry.local.owned or not owned):
            yield from _of_entry(entry, first - entry.offset, last - entry.offset)


def written(bucket: BucketLayout, pp_rank: int, shard: int, replica: int, replicas: int) -> Iterator[Piece]:
    """What one of the `replicas` of shard number `shard` writes of `bucket`: over all ranks, each element once."""
    # Of a tied weight, which the first and the last stage have, the first writes.
    if bucket.tied and pp_rank > 0:
        return
    start = shard * bucket.shard_numel
    yield from pieces(bucket, *replica_share(start, start + bucket.shard_numel, replica, replicas), owned=True)


def replica_share(start: int, stop: int, replica: int, replicas: int) -> tuple[int, int]:
    """The part of start..stop that replica number `replica` writes for all `replicas` that hold it."""
    length = stop - start
    return start + length * replica // replicas, start + length * (replica + 1) // replicas


def _of_entry(entry: Entry, start: int, stop: int) -> Iterator[Piece]:
    local = entry.local
    strides = row_major(local.shape)
    for offsets, sizes in boxes(local.shape, start, stop):
        # The padding is at the end of the dimension that TP cuts.
        inside = tuple(
            max(0, min(size, high - low - offset))
            for offset, size, (low, high) in zip(offsets, sizes, local.box, strict=True)
        )
        if prod(inside):
            at = tuple(low + offset for offset, (low, _) in zip(offsets, local.box, strict=True))
            first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
            yield Piece(local.parameter, at, inside, entry.offset + first, strides)


def boxes(shape: Extent, start: int, stop: int) -> Iterator[tuple[Extent, Extent]]:
    """(offsets, sizes) of the boxes that make up elements start..stop of a row-major array: the rest of a row, whole
    rows, the beginning of a row, and in either of those the same along the dimensions after the first."""
    if start >= stop:
        return
    row = prod(shape[1:])
    if row == 1:
        yield (start, *(0 for _ in shape[1:])), (stop - start, *shape[1:])
        return
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _inside(shape, last, start, stop)
        return
    yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _inside(shape, last, last * row, stop)


def _inside(shape: Extent, index: int, start: int, stop: int) -> Iterator[tuple[Extent, Extent]]:
    """Elements start..stop, all of which are in row `index`."""
    before = index * prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - before, stop - before):
        yield (index, *offsets), (1, *sizes)


def row_major(shape: Extent) -> Extent:
    """Elements between neighbours along each dimension of a contiguous array."""
    return tuple(reversed([*accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)]))
