"""Copies that must be equal, compared bit for bit: the silent faults of this field are copies that drift apart.

Replicas over data parallelism, parameters that TP does not cut, KV heads that several TP ranks hold, and the tied
embedding of the first and the last stage are one weight each, updated on several ranks from the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trigrid.blueprint.buckets import Entry
from trigrid.engine.comm import Comm
from trigrid.engine.zero import Bucket

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AXES = {
    "zero": "data-parallel ranks",
    "replicate": "replicas of a shard",
    "tp": "tensor-parallel ranks",
    "kv": "holders of a KV head",
    "tied": "first and last stage",
}


def disagreements(buckets: Mapping[str, Bucket], comm: Comm) -> tuple[str, ...]:
    """Every parameter of which two ranks hold copies that are not equal, with the ranks among which they are not; the
    same on all ranks. Between two steps only; every rank of the world must call it."""
    mine = []
    for axis, ranks in AXES.items():
        if comm.group(axis).size == 1:
            continue
        named = [(entry, part) for bucket in buckets.values() for entry, part in _copies(bucket, axis)]
        if not named:
            continue
        prints = torch.stack([_fingerprint(part) for _, part in named])
        # The largest and the smallest in one call: they are equal where all are.
        ends = comm.all_reduce(torch.stack([prints, ~prints]), axis, "max")
        differ = (ends[0] != ~ends[1]).tolist()
        mine += [f"{e.local.parameter.name} ({ranks})" for (e, _), d in zip(named, differ, strict=True) if d]
    gathered = comm.gather_objects(mine)
    return tuple(sorted({name for names in gathered for name in names}))  # type: ignore[attr-defined]


def _copies(bucket: Bucket, axis: str) -> Iterator[tuple[Entry, Tensor]]:
    """What this rank holds of each entry that the ranks of `axis` hold, too."""
    whole = (0, bucket.layout.numel)
    if axis == "zero":
        # Shards are different elements. What all hold is the weights, where they are kept between steps.
        kept = bucket.weights if bucket.weights is not None and not bucket.policy.shard_weights else None
        source, span = (kept, whole) if bucket.policy.shard_optimizer else (bucket.master, whole)
    else:
        source, span = bucket.master, bucket.held
    if source is None:
        return
    for entry in bucket.layout.entries:
        local = entry.local
        shared = {
            "tp": local.parameter.cut is None,
            "kv": local.parameter.cut is not None and local.copies > 1,
            "tied": local.parameter.tied,
        }
        first, last = max(entry.offset, span[0]), min(entry.stop, span[1])
        if shared.get(axis, True) and first < last:
            yield entry, source[first - span[0] : last - span[0]]


def _fingerprint(values: Tensor) -> Tensor:
    """A 64-bit sum of the bits in which every place counts differently."""
    words = values.detach().contiguous().view(WORDS[values.element_size()]).long()
    places = torch.arange(words.numel(), device=words.device)
    return (words * (2 * places + 1)).sum()
