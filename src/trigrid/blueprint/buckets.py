"""The flat layout of a bucket: where each parameter lies, and which stretches of it are treated alike.

A bucket is one contiguous array per rank. ZeRO cuts it into equal contiguous shards, so a shard may begin in the middle
of a parameter. Entries are ordered by (decay, sum group, copies): weight decay, sums over TP and ownership in the norm
are then a few stretches of a shard, not a list of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from trigrid.blueprint.decoder import Unit
from trigrid.blueprint.parameters import LocalParameter, SumGroup, localise
from trigrid.spec.layout import Layout


@dataclass(frozen=True)
class Entry:
    """A local parameter at `offset` elements from the start of its bucket."""

    local: LocalParameter
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.local.numel


@dataclass(frozen=True)
class Run:
    """Elements start..stop of a bucket, alike in weight decay, sum group and ownership."""

    start: int
    stop: int
    decay: bool
    sum_group: SumGroup
    owned: bool

    def within(self, start: int, stop: int) -> Run | None:
        """The part of this run inside start..stop, or None."""
        first, last = max(self.start, start), min(self.stop, stop)
        return Run(first, last, self.decay, self.sum_group, self.owned) if first < last else None


@dataclass(frozen=True)
class BucketLayout:
    """numel includes a tail that makes it a multiple of `shards`, which belongs to no entry and no run.

    Padding of a parameter (rows of the vocabulary) lies inside its entry: its weights and gradients stay zero.
    """

    name: str
    entries: tuple[Entry, ...]
    runs: tuple[Run, ...]
    numel: int
    shards: int
    tied: bool

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    def shard_runs(self, shard: int) -> tuple[Run, ...]:
        """The runs of one shard, with positions counted from the start of the bucket."""
        start = shard * self.shard_numel
        parts = (run.within(start, start + self.shard_numel) for run in self.runs)
        return tuple(part for part in parts if part is not None)


@dataclass(frozen=True)
class UnitBuckets:
    """A unit with, for each of its parameters, (bucket name, index of the entry in that bucket)."""

    unit: Unit
    places: tuple[tuple[str, int], ...]


def lay_out(name: str, locals_: Iterable[LocalParameter], shards: int) -> BucketLayout:
    """The bucket `name` holding `locals_`, cut into `shards`."""
    ordered = sorted(locals_, key=_treatment)
    entries, offset = [], 0
    for local in ordered:
        entries.append(Entry(local, offset))
        offset += local.numel
    runs = []
    for (decay, sum_group, _), members in groupby(entries, key=lambda e: _treatment(e.local)):
        alike = list(members)
        runs.append(Run(alike[0].offset, alike[-1].stop, decay, sum_group, alike[0].local.owned))
    tied = any(e.local.parameter.tied for e in entries)
    return BucketLayout(name, tuple(entries), tuple(runs), -(-offset // shards) * shards, shards, tied)


def stage_buckets(
    units: Sequence[Unit], layout: Layout, tp_rank: int
) -> tuple[dict[str, BucketLayout], tuple[UnitBuckets, ...]]:
    """The buckets of a stage and where each unit finds its parameters.

    One bucket per unit, except that a tied weight has its own, so that both of its stages cut it at the same places.
    """
    members: dict[str, dict[str, LocalParameter]] = {}
    for unit in units:
        for parameter in unit.parameters:
            bucket = members.setdefault("tied" if parameter.tied else unit.name, {})
            bucket.setdefault(parameter.name, localise(parameter, layout, tp_rank))
    shards = layout.dp_shard * layout.cp
    buckets = {name: lay_out(name, held.values(), shards) for name, held in members.items()}
    places = {e.local.parameter.name: (b.name, i) for b in buckets.values() for i, e in enumerate(b.entries)}
    return buckets, tuple(UnitBuckets(unit, tuple(places[p.name] for p in unit.parameters)) for unit in units)


def _treatment(local: LocalParameter) -> tuple[bool, SumGroup, int]:
    return local.parameter.decay, local.sum_group, local.copies
