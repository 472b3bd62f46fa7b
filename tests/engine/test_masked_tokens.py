"""The loss is a sum over tokens ÷ the global number of valid ones, wherever the ignored ones lie."""

from __future__ import annotations

from functools import partial

import pytest
from helpers import planted
from helpers.jobs import named, small_job
from helpers.masked import MASKS, masked
from helpers.torch_decoder import alone

from trigrid.check.parity import Reference, judge, run_rank
from trigrid.check.pool import Pool
from trigrid.spec.job import Job

LAYOUTS = [("dp1", 0), ("dp2", 2), ("dp4", 0), ("dp4", 1), ("pp2dp2", 3), ("tp2pp2dp2", 1)]


def job_of(name: str, zero: int) -> Job:
    return small_job(named(name, zero=zero), layers=2)


def wanted(pool: Pool, job: Job, what: str) -> Reference:
    """The plain decoder on the whole batch in one pass."""
    return pool.run(alone, 1, job, partial(masked, what))[0]


@pytest.mark.parametrize("what", MASKS[:2])
@pytest.mark.parametrize(("name", "zero"), LAYOUTS)
def test_uneven_microbatches(pool: Pool, name: str, zero: int, what: str) -> None:
    """R08, R09: 90 % or all of a microbatch ignored, with dp 1, 2 and 4."""
    job = job_of(name, zero)
    runs = pool.run(run_rank, job.parallel.world, job, partial(masked, what))
    found = judge(job, runs, wanted(pool, job, what))
    assert found.passed, found


@pytest.mark.parametrize(("name", "zero"), LAYOUTS[1:])
def test_a_rank_without_a_valid_token(pool: Pool, name: str, zero: int) -> None:
    """R08, R09."""
    job = job_of(name, zero)
    runs = pool.run(run_rank, job.parallel.world, job, partial(masked, "a rank"))
    found = judge(job, runs, wanted(pool, job, "a rank"))
    assert found.passed, found


@pytest.mark.parametrize(("name", "zero"), LAYOUTS)
def test_a_batch_without_a_valid_token(pool: Pool, name: str, zero: int) -> None:
    """R08: no loss, no gradient, no NaN; the weights only decay."""
    job = job_of(name, zero)
    for run in pool.run(run_rank, job.parallel.world, job, partial(masked, "everything")):
        assert run.losses == run.norms == (0.0, 0.0, 0.0)
        assert not any(values.any() for step in run.gradients for _, values in step.values())
        assert all(abs(values).max() < 2 for _, values in run.weights.values())
        assert not run.disagreements


@pytest.mark.parametrize("what", MASKS[:3])
def test_a_mean_of_means_is_caught(pool: Pool, what: str) -> None:
    """R08, R09: each of these batches tells it from the mean."""
    job = job_of("dp2", 1)
    runs = pool.run(run_rank, 2, job, partial(masked, what, planted.mean_of_means))
    found = judge(job, runs, wanted(pool, job, what))
    assert not found.passed
    assert found.gradient_error > 1e-3, found
