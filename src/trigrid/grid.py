"""A layout placed on a cluster: ranks, coordinates, groups asked for by meaning, and the tier each group crosses.

Groups
    tp, cp, pp, dp     the ranks that differ along one axis only
    zero               the ranks that share ZeRO shards: dp_shard × cp, the nearer part of dp
    replicate          the ranks that hold the same ZeRO shard (HSDP), the farther part of dp
    batch              the ranks that see other tokens of the same global batch: dp × cp
    kv                 the TP ranks that hold the same KV head, where kv_heads < tp
    tied               the pipeline ranks of the first and the last stage, which share a tied embedding
    world              every rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from trigrid.errors import Problem
from trigrid.spec.cluster import Cluster, Tier
from trigrid.spec.job import Job
from trigrid.spec.layout import AXES, Axis, Layout


class Coord(NamedTuple):
    """Position of a rank along each axis."""

    dp: int
    pp: int
    cp: int
    tp: int


PICTURED_REPLICAS = 8


@dataclass(frozen=True)
class Grid:
    """rank ↔ (dp, pp, cp, tp) in `layout.order`, slowest axis first.

    kv_copies: TP ranks that hold the same KV head (1 where kv_heads ≥ tp).
    """

    layout: Layout
    cluster: Cluster = field(default_factory=Cluster)
    kv_copies: int = 1

    @property
    def world(self) -> int:
        return self.layout.world

    @cached_property
    def _stride(self) -> dict[Axis, int]:
        stride, step = {}, 1
        for axis in reversed(self.layout.order):
            stride[axis] = step
            step *= self.layout.degree(axis)
        return stride

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The pipeline rank of every rank."""
        return tuple(self.coord(rank).pp for rank in range(self.world))

    def coord(self, rank: int) -> Coord:
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} of a world of {self.world}")
        return Coord(*(rank // self._stride[axis] % self.layout.degree(axis) for axis in AXES))

    def rank(self, coord: Coord) -> int:
        assert all(0 <= at < self.layout.degree(axis) for axis, at in zip(AXES, coord, strict=True)), coord
        return sum(self._stride[axis] * at for axis, at in zip(AXES, coord, strict=True))

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group called `name` that holds `rank`, in order of their coordinate."""
        here, layout, shards = self.coord(rank), self.layout, self.layout.dp_shard
        every = {axis: range(layout.degree(axis)) for axis in AXES}
        match name:
            case "tp" | "cp" | "pp" | "dp":
                return self._along(here, {name: every[name]})
            case "zero":
                nearer = here.dp // shards * shards
                return self._along(here, {"dp": range(nearer, nearer + shards), "cp": every["cp"]})
            case "replicate":
                return self._along(here, {"dp": range(here.dp % shards, layout.dp, shards)})
            case "batch":
                return self._along(here, {"dp": every["dp"], "cp": every["cp"]})
            case "kv":
                first = here.tp // self.kv_copies * self.kv_copies
                return self._along(here, {"tp": range(first, first + self.kv_copies)})
            case "tied":
                ends = sorted({layout.placement[0], layout.placement[-1]})
                return self._along(here, {"pp": ends if here.pp in ends else [here.pp]})
            case "world":
                return tuple(range(self.world))
        raise KeyError(f"no group is called {name!r}")

    def _along(self, here: Coord, ranges: Mapping[Axis, Iterable[int]]) -> tuple[int, ...]:
        """The ranks at `here` but for the axes of `ranges`, which take each of their values, in order of coordinate."""
        places = (ranges.get(axis, (at,)) for axis, at in zip(AXES, here, strict=True))
        return tuple(self.rank(Coord(*coord)) for coord in product(*places))

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Every group called `name`, each once."""
        found: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for rank in range(self.world):
            if rank not in seen:
                found.append(self.group(name, rank))
                seen.update(found[-1])
        return found

    def largest(self, name: str) -> int:
        """The size of the largest group called `name`; rank 0 is in one of them."""
        return len(self.group(name, 0))

    def tier(self, ranks: tuple[int, ...]) -> Tier:
        """The slowest network between any two of `ranks`."""
        per_node = self.cluster.gpus_per_node
        per_leaf = per_node * self.cluster.nodes_per_leaf
        if len(ranks) < 2:
            return Tier.LOCAL
        if len({r // per_node for r in ranks}) == 1:
            return Tier.NVLINK
        return Tier.LEAF if len({r // per_leaf for r in ranks}) == 1 else Tier.SPINE

    def worst_tier(self, name: str) -> Tier:
        """The slowest tier over all groups called `name`."""
        return max(self.tier(group) for group in self.groups(name))

    def picture(self) -> str:
        """The grid as text: one line per data-parallel replica and pipeline stage, TP ranks side by side; of many
        replicas the first and the last."""
        width = len(str(self.world - 1))
        layout = self.layout
        shown = range(layout.dp) if layout.dp <= PICTURED_REPLICAS else (0, 1, layout.dp - 1)
        lines = []
        for dp in shown:
            if dp > 2 and dp == layout.dp - 1 and len(shown) < layout.dp:
                lines.append(f"… {layout.dp - 3} replicas alike")
            for pp in range(layout.pp):
                cells = [
                    " ".join(f"{self.rank(Coord(dp, pp, cp, tp)):>{width}}" for tp in range(layout.tp))
                    for cp in range(layout.cp)
                ]
                lines.append(f"dp {dp}  pp {pp}  tp [{' | '.join(cells)}]")
        return "\n".join(lines)


def grid_of(job: Job) -> Grid:
    """The grid of a job."""
    return Grid(job.parallel, job.cluster, max(1, job.parallel.tp // job.model.kv_heads))


def golden_rules(grid: Grid) -> list[Problem]:
    """Warnings where an axis crosses a network that is too slow for what it carries.

    Tensor parallelism moves activations several times per layer and belongs inside a node; neighbouring pipeline
    stages exchange one boundary per microbatch and belong under one leaf; only data parallelism may cross the spine.
    """
    problems = []
    layout, node = grid.layout, grid.cluster.gpus_per_node
    usual = replace(grid, layout=replace(layout, order=AXES))
    if (tier := grid.worst_tier("tp")) > Tier.NVLINK:
        reason = (
            f"a tensor-parallel group crosses nodes of {node} GPUs ({tier.name.lower()}): "
            "it exchanges activations several times per layer and belongs inside the NVLink domain"
        )
        if usual.worst_tier("tp") <= Tier.NVLINK:
            problems.append(Problem("parallel.order", " ".join(layout.order), reason, (" ".join(AXES),)))
        else:
            smaller = [replace(grid, layout=replace(layout, tp=tp)) for tp in range(1, node + 1) if node % tp == 0]
            legal = [g.layout.tp for g in smaller if g.worst_tier("tp") <= Tier.NVLINK]
            problems.append(
                Problem(
                    "parallel.tp",
                    layout.tp,
                    reason,
                    tuple(sorted(sorted(legal, key=lambda tp: abs(tp - layout.tp))[:3])),
                )
            )
    if grid.worst_tier("pp") > Tier.LEAF and usual.worst_tier("pp") <= Tier.LEAF:
        reason = (
            "neighbouring pipeline stages cross the spine, which data parallelism could cross in their place: "
            "a gradient reduction overlaps with the backward, and a stage boundary does not"
        )
        problems.append(Problem("parallel.order", " ".join(layout.order), reason, (" ".join(AXES),)))
    return problems
