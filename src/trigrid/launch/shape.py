"""How many nodes a job takes, and how many ranks each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trigrid.errors import Problem, Refused
from trigrid.grid import golden_rules, grid_of
from trigrid.spec.cluster import Tier
from trigrid.spec.job import Job

NODES, PER_NODE = "--nodes", "--ranks-per-node"


@dataclass(frozen=True)
class Shape:
    """nodes of `per_node` ranks each."""

    nodes: int
    per_node: int


def shape_of(job: Job, nodes: int | None, per_node: int | None) -> Shape:
    """The shape of `job`, from what is given of it; a node has `cluster.gpus_per_node` ranks where nothing is.

    Raises Refused where the ranks do not fill the nodes, or tensor parallelism crosses them that the job has inside.
    """
    world = job.parallel.world
    for key, value in ((NODES, nodes), (PER_NODE, per_node)):
        if value is not None and (value < 1 or world % value):
            reason = f"{world} ranks do not fill nodes of equally many"
            raise Refused([Problem(key, value, reason, _nearest(world, value))])
    if nodes and per_node and nodes * per_node != world:
        reason = f"{nodes} · {per_node} = {nodes * per_node} ranks, and the job has {world}"
        raise Refused([Problem(NODES, nodes, reason, (world // per_node,))])
    if nodes is None and per_node is None:
        per_node = min(world, job.cluster.gpus_per_node)
        if world % per_node:
            reason = f"{world} ranks do not fill nodes of {per_node} (cluster.gpus_per_node)"
            raise Refused([Problem(PER_NODE, per_node, reason, _nearest(world, per_node))])
    per_node = per_node or world // (nodes or 1)
    _check_tensor_parallelism(job, per_node)
    return Shape(world // per_node, per_node)


def _check_tensor_parallelism(job: Job, per_node: int) -> None:
    """What every rank would find at the start, before the job waits in a queue."""
    grid = grid_of(job)
    there = replace(grid, cluster=replace(grid.cluster, gpus_per_node=per_node))
    if there.worst_tier("tp") > Tier.NVLINK and grid.worst_tier("tp") <= Tier.NVLINK:
        problem = next(p for p in golden_rules(there) if p.key in ("parallel.tp", "parallel.order"))
        way = f"{problem.reason}. Give {PER_NODE}, or cluster.gpus_per_node = {per_node} to train nevertheless"
        raise Refused([replace(problem, reason=way)])


def _nearest(world: int, value: int) -> tuple[int, ...]:
    divisors = sorted((n for n in range(1, world + 1) if world % n == 0), key=lambda n: abs(n - value))
    return tuple(sorted(divisors[:3]))
