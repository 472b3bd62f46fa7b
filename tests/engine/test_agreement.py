"""Copies of a weight that drift apart are named."""

from __future__ import annotations

import pytest
from helpers.jobs import named, small_job
from helpers.probes import disagree

from trigrid.check.pool import Pool

TIED = {"tied": True, "qk_norm": True}


@pytest.mark.parametrize(
    ("layout", "zero", "culprit", "parameter", "ranks"),
    [
        ("dp2", 0, 1, "layers.3.down.weight", "data-parallel ranks"),
        ("dp2", 1, 1, "layers.3.down.weight", "data-parallel ranks"),
        ("tp2", 3, 1, "layers.2.ffn_norm.weight", "tensor-parallel ranks"),
        ("tp4", 1, 2, "layers.0.k.weight", "holders of a KV head"),
        ("pp2", 1, 1, "embedding.weight", "first and last stage"),
        ("pp2", 0, 0, "embedding.weight", "first and last stage"),
    ],
)
def test_one_bit_is_enough(pool: Pool, layout: str, zero: int, culprit: int, parameter: str, ranks: str) -> None:
    """R38, R21: with the rank's own element only, where weights are sharded."""
    job = small_job(named(layout, zero=zero), **TIED)
    for before, after in pool.run(disagree, job.parallel.world, job, culprit, parameter):
        assert before == ()
        assert after == (f"{parameter} ({ranks})",)


def test_replicas_of_a_shard(pool: Pool) -> None:
    """R06."""
    job = small_job(named("dp4", zero=3, dp_replicate=2))
    for before, after in pool.run(disagree, 4, job, 2, "layers.3.attention_norm.weight"):
        assert (before, after) == ((), ("layers.3.attention_norm.weight (replicas of a shard)",))
