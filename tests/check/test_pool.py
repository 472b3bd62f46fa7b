"""Workers through which many layouts come and go."""

from __future__ import annotations

from helpers.jobs import named, small_job
from helpers.probes import threads

from trigrid.check.parity import run_rank
from trigrid.check.pool import Pool


def test_nothing_of_a_run_is_left(pool: Pool) -> None:
    """Each process group has threads that wake up again and again: of hundreds, a machine would do nothing else."""
    job, before = small_job(named("tp2dp2", zero=3)), []
    for _ in range(3):
        pool.run(run_rank, 4, job)
        before.append(pool.run(threads, 4))
    assert before[1:] == before[:1] * 2
