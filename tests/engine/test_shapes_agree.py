"""Ranks that expect batches of different shapes are told, and do not die or wait."""

from __future__ import annotations

import pytest
from helpers.jobs import named, small_job
from helpers.step_probes import told_of_shapes

from trigrid.check.pool import Pool


@pytest.mark.parametrize(
    ("name", "culprit", "shape"),
    [
        ("pp2", 1, (4, 2, 8)),
        ("pp2", 0, (3, 2, 16)),
        ("pp4", 2, (4, 1, 16)),
        ("tp2", 1, (4, 2, 12)),
        ("pp2dp2", 3, (1, 2, 16)),
    ],
)
def test_shapes_that_disagree(pool: Pool, name: str, culprit: int, shape: tuple[int, int, int]) -> None:
    """R48: training and validation; the message names stage, expected and got, on every rank; R77."""
    job = small_job(named(name))
    whole = (job.batch.microbatches(job.parallel), 2, 16)
    expected, got = (shape, whole) if culprit == 0 else (whole, shape)
    for messages in pool.run(told_of_shapes, job.parallel.world, job, culprit, shape):
        for message in messages:
            assert "(rank 0) expected {} microbatches of {} × {} tokens".format(*expected) in message
            assert "got {} microbatches of {} × {} tokens".format(*got) in message
            stage = culprit if name.startswith("pp") and "dp" not in name else 1 if "pp" in name else 0
            assert f"pipeline rank {stage} (rank {culprit}) {'expected' if culprit == 0 else 'got'}" in message
