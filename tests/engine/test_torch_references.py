"""torch's own parallelism against ours: the same decoder in plain modules, cut by code that shares nothing with this
engine, takes the same steps from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.jobs import named, small_job
from helpers.torch_decoder import alone, by_fully_shard, by_pipelining, by_tensor_parallelism

from trigrid.check.parity import GRADIENT_LIMIT, LOSS_LIMIT, WEIGHT_LIMIT, Reference, judge, reference, run_rank
from trigrid.check.pool import Pool

MODEL = {"layers": 4, "qkv_bias": True, "qk_norm": True}


def assert_alike(ours: Reference, wanted: Reference) -> None:
    """Law 1 between two references."""
    assert ours.losses == pytest.approx(wanted.losses, rel=LOSS_LIMIT["fp64"])
    assert ours.norms == pytest.approx(wanted.norms, rel=GRADIENT_LIMIT["fp64"])
    steps = [*zip(ours.gradients, wanted.gradients, strict=True), (ours.weights, wanted.weights)]
    limits = [GRADIENT_LIMIT["fp64"]] * len(ours.gradients) + [WEIGHT_LIMIT]
    for (got, want), limit in zip(steps, limits, strict=True):
        assert got.keys() == want.keys()
        floor = 1e-6 * np.sqrt(sum(np.square(array).sum() for array in want.values()))
        for name, array in want.items():
            size = max(np.linalg.norm(array), floor)
            assert np.linalg.norm(got[name] - array) <= limit * size, name


@pytest.mark.parametrize("tied", [False, True])
def test_one_process(pool: Pool, tied: bool) -> None:
    """Whole batch in one pass, and loss and attention written out, against a microbatch at a time. R02, R08."""
    job = small_job(named("dp1"), **MODEL, tied=tied)
    (wanted,) = pool.run(alone, 1, job)
    assert min(wanted.norms) > job.optimizer.clip_norm, "R18: nothing would be clipped"
    assert_alike(reference(job, pool), wanted)


@pytest.mark.parametrize(
    ("theirs", "layout", "fields", "tied"),
    [
        (by_fully_shard, "dp2", {"zero": 3}, True),
        (by_pipelining, "pp2", {"zero": 1}, False),
        (by_tensor_parallelism, "tp2", {"zero": 0, "sequence_parallel": True}, False),
    ],
    ids=["fully_shard", "pipelining", "dtensor"],
)
def test_torch_s_own(
    pool: Pool, theirs: Callable[..., Reference], layout: str, fields: dict[str, object], tied: bool
) -> None:
    """R01, R02, R04, R05, R18, R38 by another's hand: losses, gradients, norms and weights of three steps."""
    job = small_job(named(layout, **fields), **MODEL, tied=tied)
    wanted = pool.run(theirs, 2, job)
    assert_alike(wanted[0], wanted[1])
    found = judge(job, pool.run(run_rank, 2, job, None), wanted[0])
    assert found.passed, found


def test_a_difference_would_be_seen(pool: Pool) -> None:
    """Another's run of another seed, or with another clipping, is not ours."""
    job = small_job(named("pp2"), **MODEL)
    runs = pool.run(run_rank, 2, job, None)
    for other in (
        replace(job, optimizer=replace(job.optimizer, clip_norm=0.4999)),
        replace(job, run=replace(job.run, seed=1)),
    ):
        assert not judge(job, runs, pool.run(by_pipelining, 2, other)[0]).passed
