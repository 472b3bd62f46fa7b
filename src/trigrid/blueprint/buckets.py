"""The flat layout of a bucket: where each parameter lies, and which stretches of it are treated alike.

A bucket is one contiguous array per rank. ZeRO cuts it into equal contiguous shards, so a shard may begin in the middle
of a parameter. Entries are ordered by (decay, sum group, copies): weight decay, sums over TP and ownership in the norm
are then a few stretches of a shard, not a list of parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from trigrid.blueprint.decoder import Unit, decoder
from trigrid.blueprint.frozen import frozen_parameters
from trigrid.blueprint.parameters import LocalParameter, SumGroup, localise
from trigrid.spec.job import Job
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
    frozen: what it holds is not trained: it has weights and nothing else.
    """

    name: str
    entries: tuple[Entry, ...]
    runs: tuple[Run, ...]
    numel: int
    shards: int
    tied: bool
    frozen: bool

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
    """A unit with, for each of its parameters, (bucket name, index of the entry in that bucket).

    backward: whether it has one; an embedding whose parameters are all frozen has none.
    """

    unit: Unit
    places: tuple[tuple[str, int], ...]
    backward: bool

    @property
    def buckets(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.places)


def lay_out(name: str, locals_: Iterable[LocalParameter], shards: int, frozen: bool = False) -> BucketLayout:
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
    return BucketLayout(name, tuple(entries), tuple(runs), -(-offset // shards) * shards, shards, tied, frozen)


RankBuckets = tuple[dict[str, BucketLayout], dict[int, tuple[UnitBuckets, ...]]]


def job_buckets(job: Job, pp_rank: int, tp_rank: int) -> RankBuckets:
    """The buckets of a rank of `job`, and by stage where each unit finds its parameters."""
    layout, model = job.parallel, decoder(job.model)
    stages = {stage: model.stage(layout, stage) for stage in layout.stages_of(pp_rank)}
    return rank_buckets(stages, layout, tp_rank, frozen_parameters(job))


def rank_buckets(
    stages: Mapping[int, Sequence[Unit]], layout: Layout, tp_rank: int, frozen: Collection[str] = ()
) -> RankBuckets:
    """The buckets of a rank that holds `stages`, and where each unit finds its parameters.

    One bucket for each unit, or for neighbours in a stage that have at most `layout.bucket_numel` elements together.
    A tied weight has its own, so that both of its stages cut it at the same places, and so have `frozen` parameters.
    """
    members: dict[tuple[str, bool], dict[str, LocalParameter]] = {}
    where: dict[str, str] = {}
    for units in stages.values():
        for name, unit in _neighbours(units, layout, tp_rank):
            for parameter in unit.parameters:
                still = parameter.name in frozen
                bucket = "tied" if parameter.tied else name + (" frozen" if still else "")
                where[parameter.name] = bucket
                held = members.setdefault((bucket, still), {})
                held.setdefault(parameter.name, localise(parameter, layout, tp_rank))
    shards = layout.dp_shard * layout.cp
    buckets = {name: lay_out(name, held.values(), shards, still) for (name, still), held in members.items()}
    index = {e.local.parameter.name: i for b in buckets.values() for i, e in enumerate(b.entries)}

    def placed(unit: Unit) -> UnitBuckets:
        names = [p.name for p in unit.parameters]
        backward = unit.kind != "embedding" or not all(name in frozen for name in names)
        return UnitBuckets(unit, tuple((where[name], index[name]) for name in names), backward)

    return buckets, {stage: tuple(map(placed, units)) for stage, units in stages.items()}


def stretches(units: Iterable[UnitBuckets], bucket: str) -> int:
    """How often a pass through `units` comes to `bucket` and leaves it again."""
    return sum(there for there, _ in groupby(bucket in unit.buckets for unit in units))


def _neighbours(units: Sequence[Unit], layout: Layout, tp_rank: int) -> Iterator[tuple[str, Unit]]:
    """Each unit with the name of the bucket that it shares with its neighbours."""
    group: list[Unit] = []
    held = 0
    for unit in units:
        numel = sum(localise(p, layout, tp_rank).numel for p in unit.parameters if not p.tied)
        if group and held + numel > layout.bucket_numel:
            yield from _shared(group)
            group, held = [], 0
        group.append(unit)
        held += numel
    yield from _shared(group)


def _shared(group: Sequence[Unit]) -> Iterator[tuple[str, Unit]]:
    name = group[0].name if len(group) == 1 else f"{group[0].name} … {group[-1].name}"
    return ((name, unit) for unit in group)


def _treatment(local: LocalParameter) -> tuple[bool, SumGroup, int]:
    return local.parameter.decay, local.sum_group, local.copies
