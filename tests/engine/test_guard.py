"""What stops an update, and validation, which must not disturb one."""

from __future__ import annotations

import math

import pytest
from helpers.jobs import named, small_job
from helpers.probes import evaluate_and_train, evaluate_between, poison

from trigrid.check.pool import Pool


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_bad_gradient_changes_nothing(pool: Pool, zero: int, value: float) -> None:
    """R92: one element on one rank; every rank leaves its weights alone and names rank and parameter, and the next step
    goes on."""
    # Rank 7 of TP2 × PP2 × DP2 holds the last layers.
    job = small_job(named("tp2pp2dp2", zero=zero), precision="bf16")
    for seen in pool.run(poison, 8, job, 7, "layers.4.down.weight", value):
        assert seen.result.not_finite == ("rank 7: layers.4.down.weight",)
        assert not seen.result.updated
        assert seen.unchanged
        assert seen.as_if_never
        assert seen.later.updated
        assert math.isfinite(seen.later.gradient_norm)


@pytest.mark.parametrize(("name", "zero"), [("tp2pp2dp2", 1), ("pp2dp2", 3), ("dp2", 2)])
def test_validation_disturbs_nothing(pool: Pool, name: str, zero: int) -> None:
    job = small_job(named(name, zero=zero), tied=True)
    for without, with_validation in pool.run(evaluate_between, job.parallel.world, job):
        assert without == with_validation


def test_validation_loss_is_the_training_loss_of_the_same_batch(pool: Pool) -> None:
    """Also R53: every rank knows the loss, wherever it was computed; R20: bit for bit the same."""
    results = pool.run(evaluate_and_train, 8, small_job(named("tp2pp2dp2", zero=3)))
    assert len({loss for loss, _ in results}) == 1
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-14)
