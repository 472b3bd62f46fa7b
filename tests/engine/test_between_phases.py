"""Between the phases of a step, and over many steps."""

from __future__ import annotations

import pytest
from helpers.jobs import named, small_job
from helpers.step_probes import gradients_around_an_evaluation, many_steps

from trigrid.check.pool import Pool


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dp1", {}),
        ("dp2", {"zero": 2}),
        ("dp4", {"zero": 0}),
        ("pp2dp2", {"zero": 3}),
        ("pp2dp2", {"zero": 3, "gather": "per_step"}),
        ("tp2pp2", {"zero": 1, "sequence_parallel": True, "recompute": "full"}),
        ("pp2dp2", {"zero": 2, "schedule": "zbv", "virtual_stages": 2}),
    ],
    ids=str,
)
def test_gradients_survive_a_validation_of_another_shape(pool: Pool, name: str, fields: dict[str, object]) -> None:
    """R10: before and after the gradients are summed; not a bit of gradients, norm or weights changes."""
    job = small_job(named(name, **fields), tied=True)
    disturbed, wanted = (
        pool.run(gradients_around_an_evaluation, job.parallel.world, job, evaluate) for evaluate in (True, False)
    )
    assert disturbed == wanted
    assert all(norm > 0 for _, norm, _ in wanted)


@pytest.mark.parametrize("zero", [1, 2])
def test_both_copies_of_a_tied_weight_stay_alike(pool: Pool, zero: int) -> None:
    """R21: after 20 steps, bit for bit, and with the losses of a single process."""
    (alone,) = pool.run(many_steps, 1, small_job(named("dp1"), tied=True), 20)
    job = small_job(named("pp2dp2", zero=zero), tied=True)
    for losses, disagreements in pool.run(many_steps, 4, job, 20):
        assert losses == pytest.approx(alone[0], rel=1e-8)
        assert disagreements == ()
