"""Bytes of state that one rank holds between two steps."""

from __future__ import annotations

from trigrid.blueprint.buckets import job_buckets
from trigrid.grid import grid_of
from trigrid.ledger import Ledger, state_between_steps
from trigrid.spec.job import Job
from trigrid.spec.layout import zero_policy
from trigrid.spec.precision import PRECISIONS


def rank_state(job: Job, rank: int) -> Ledger:
    """The state of `rank`, summed over its buckets."""
    grid = grid_of(job)
    at = grid.coord(rank)
    shard = grid.group("zero", rank).index(rank)
    buckets, _ = job_buckets(job, at.pp, at.tp)
    total = Ledger()
    for bucket in buckets.values():
        total += state_between_steps(bucket, shard, zero_policy(job.parallel), PRECISIONS[job.run.precision])
    return total
