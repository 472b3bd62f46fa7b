"""The dry run and the real one: the same program, byte for byte, after every action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.jobs import named, small_job
from helpers.traced import hoarding, talking

from trigrid.check.beside import beside
from trigrid.check.matrix import layout_name, options_name
from trigrid.check.pairs import OPTIONS, covering
from trigrid.check.pool import Pool
from trigrid.check.prove import Proof, program_software
from trigrid.plan.plan import make_plan
from trigrid.spec.job import Job

MOST = 16
"""Of the 48 jobs that cover every pair of options: these cover 88 % of the pairs."""


def jobs() -> list[Job]:
    """TP2 × PP2 × DP2 under every ZeRO stage, and most pairs of options."""
    base = small_job(named("tp2pp2dp2"))
    batch, model = replace(base.batch, global_batch=12), replace(base.model, layers=4)
    layouts = [named("tp2pp2dp2", zero=zero) for zero in range(4)]
    return covering(replace(base, batch=batch, model=model), layouts)[:MOST]


@pytest.mark.parametrize("job", jobs(), ids=lambda job: f"{layout_name(job.parallel)} {options_name(job, OPTIONS)}")
def test_real_processes_do_what_a_rank_alone_does(pool: Pool, job: Job) -> None:
    """State, collectives and operations equal, what is kept after each action too, the peak within 1 %; and all but
    the peak as predicted."""
    found = beside(job, pool, (0, 7))
    assert not found.differences()
    assert not found.unplanned()


@pytest.mark.parametrize(
    ("layout", "function", "differs", "unplanned"),
    [
        ("dp2", hoarding, "peaks are ", "whole gradients outlives the step, "),
        ("tp2", talking, "rank 0: calls of tp all_reduce ", "calls of tp all_reduce "),
    ],
)
def test_a_rank_that_does_more_among_its_peers_is_found(
    pool: Pool, layout: str, function: Callable[..., Proof], differs: str, unplanned: str
) -> None:
    """The comparison is tested too: what is planted in the real processes alone is named."""
    job = small_job(named(layout, zero=2))
    sound = beside(job, pool, (0,))
    assert not sound.differences()
    faulty = replace(sound, real=tuple(pool.run(function, 2, job, make_plan(job, program_software(job)))))
    assert any(line.startswith(differs) for line in faulty.differences())
    assert any(unplanned in line for line in faulty.unplanned())
