"""Steps after steps: other lengths, the same bits again."""

from __future__ import annotations

import pytest
from helpers.jobs import named, small_job
from helpers.probes import bits_after_steps, changing_sequences

from trigrid.check.pool import Pool

LENGTHS = (16, 8, 12, 4, 16)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("pp4", {}), ("pp2dp2", {"zero": 3, "recompute": "full"}), ("tp2pp2", {"sequence_parallel": True})],
)
def test_the_length_of_a_sequence_may_change(pool: Pool, name: str, fields: dict[str, object]) -> None:
    """R10, R48, R49: between steps, and between a step and a validation; nothing is left over from another shape."""
    alone = pool.run(changing_sequences, 1, small_job(named("dp1")), LENGTHS)[0]
    job = small_job(named(name, **fields))
    for rank in pool.run(changing_sequences, job.parallel.world, job, LENGTHS):
        for ours, wanted in zip(rank, alone, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_job_gives_the_same_bits(pool: Pool, precision: str) -> None:
    """R12: every loss and every weight, run twice."""
    job = small_job(named("tp2pp2dp2", zero=2, sequence_parallel=True), precision=precision, tied=True)
    assert pool.run(bits_after_steps, 8, job) == pool.run(bits_after_steps, 8, job)
