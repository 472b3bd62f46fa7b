"""A layout placed on a cluster: ranks, coordinates, groups asked for by meaning, and the tier each group crosses.

Groups
    tp, cp, pp, dp     the ranks that differ along one axis only
    zero               the ranks that share ZeRO shards: dp_shard × cp, the nearer part of dp
    replicate          the ranks that hold the same ZeRO shard (HSDP), the farther part of dp
    batch              the ranks that see other tokens of the same global batch: dp × cp
    kv                 the TP ranks that hold the same KV head, where kv_heads < tp
    tied               the first and the last pipeline rank, which share a tied embedding
    world              every rank
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
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

    def coord(self, rank: int) -> Coord:
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} of a world of {self.world}")
        return Coord(*(rank // self._stride[axis] % self.layout.degree(axis) for axis in AXES))

    def rank(self, coord: Coord) -> int:
        return sum(self._stride[axis] * at for axis, at in zip(AXES, coord, strict=True))

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group called `name` that holds `rank`, in order of their coordinate."""
        here = self.coord(rank)
        shards = self.layout.dp_shard
        match name:
            case "tp" | "cp" | "pp" | "dp":
                return self._along(here, lambda c: c._replace(**{name: 0}))
            case "zero":
                return self._along(here, lambda c: (c.dp // shards, c.pp, c.tp))
            case "replicate":
                return self._along(here, lambda c: (c.dp % shards, c.pp, c.cp, c.tp))
            case "batch":
                return self._along(here, lambda c: (c.pp, c.tp))
            case "kv":
                return self._along(here, lambda c: c._replace(tp=c.tp // self.kv_copies))
            case "tied":
                ends = sorted({0, self.layout.pp - 1})
                return tuple(self.rank(here._replace(pp=pp)) for pp in ends) if here.pp in ends else (rank,)
            case "world":
                return tuple(range(self.world))
        raise KeyError(f"no group is called {name!r}")

    def _along(self, here: Coord, same: Callable[[Coord], object]) -> tuple[int, ...]:
        """Ranks for which `same` gives what it gives for `here`, walking only the axes that `same` ignores."""
        free = [
            axis
            for i, axis in enumerate(AXES)
            if any(
                same(here._replace(**{axis: at})) == same(here)
                for at in range(self.layout.degree(axis))
                if at != here[i]
            )
        ]
        members = [here]
        for axis in free:
            members = [m._replace(**{axis: at}) for m in members for at in range(self.layout.degree(axis))]
        return tuple(self.rank(m) for m in sorted(m for m in members if same(m) == same(here)))

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
        """The slowest tier over all groups called `name`; for "pp" between neighbouring stages only."""
        groups = self.groups(name)
        if name == "pp":
            groups = [pair for g in groups for pair in pairwise(g)]
        return max((self.tier(g) for g in groups), default=Tier.LOCAL)

    def picture(self) -> str:
        """The grid as text: one line per data-parallel replica and pipeline stage, TP ranks side by side."""
        width = len(str(self.world - 1))
        lines = []
        for dp in range(self.layout.dp):
            for pp in range(self.layout.pp):
                cells = [
                    " ".join(f"{self.rank(Coord(dp, pp, cp, tp)):>{width}}" for tp in range(self.layout.tp))
                    for cp in range(self.layout.cp)
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
    tp, pp = grid.worst_tier("tp"), grid.worst_tier("pp")
    if tp > Tier.NVLINK:
        legal = tuple(d for d in range(1, grid.cluster.gpus_per_node + 1) if grid.cluster.gpus_per_node % d == 0)
        problems.append(
            Problem(
                "parallel.tp",
                grid.layout.tp,
                f"a tensor-parallel group crosses nodes of {grid.cluster.gpus_per_node} GPUs ({tp.name.lower()}): "
                "it exchanges activations several times per layer and belongs inside the NVLink domain",
                legal[-3:],
            )
        )
    if pp > Tier.LEAF and grid.worst_tier("dp") < Tier.SPINE:
        problems.append(
            Problem(
                "parallel.order",
                " ".join(grid.layout.order),
                "neighbouring pipeline stages cross the spine while data parallelism does not: "
                "exchange the two, since a gradient reduction overlaps with the backward and a stage boundary does not",
                (" ".join(AXES),),
            )
        )
    return problems
