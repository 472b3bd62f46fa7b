"""Workers through which many layouts come and go."""

from __future__ import annotations

import time

from helpers.jobs import named, small_job
from helpers.probes import threads

from trigrid.check.parity import run_rank
from trigrid.check.pool import Pool

PATIENCE_S = 20.0


def test_nothing_of_a_run_is_left(pool: Pool) -> None:
    """Each process group has threads that wake up again and again: of hundreds, a machine would do nothing else."""
    job = small_job(named("tp2dp2", zero=3))
    pool.run(run_rank, 4, job)
    before = pool.run(threads, 4)
    for _ in range(3):
        pool.run(run_rank, 4, job)
    deadline = time.monotonic() + PATIENCE_S
    # Threads take a moment to end, those of tests before this one too.
    while any(now > then for now, then in zip(pool.run(threads, 4), before, strict=True)):
        assert time.monotonic() < deadline, "threads of process groups stay"
