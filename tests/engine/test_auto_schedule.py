"""`schedule = "auto"` without a file: made from the planner's times of the stages, by every process alike, and run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.jobs import named, small_job
from helpers.probes import watch
from helpers.runs import run

from trigrid.check.parity import judge, reference, run_rank
from trigrid.check.pool import Pool
from trigrid.errors import Refused
from trigrid.ledger import STATE
from trigrid.plan.scheduled import check_schedule, job_schedule
from trigrid.plan.simulate import simulate
from trigrid.plan.state import rank_state
from trigrid.plan.traffic import step_traffic
from trigrid.schedule import Kind, validate
from trigrid.spec.job import Job

EXAMPLE = Path(__file__).parents[2] / "examples" / "parity.toml"
UNEQUAL = ["--pp", "2", "--schedule", "auto", "--parallel.stage_layers", "[6,2]"]


def uneven(virtual: int, *split: int, **fields: object) -> Job:
    layout = named("pp2dp2", schedule="auto", virtual_stages=virtual, stage_layers=split, **fields)
    job = small_job(layout, layers=sum(split), tied=True)
    return replace(job, batch=replace(job.batch, global_batch=12, micro_batch=1))


@pytest.mark.parametrize(("virtual", "split", "zero"), [(1, (6, 2), 3), (2, (3, 1, 2, 2), 1)], ids=["6-2", "3-1-2-2"])
def test_parity_and_traffic_with_unequal_stages(pool: Pool, virtual: int, split: tuple[int, ...], zero: int) -> None:
    job = uneven(virtual, *split, zero=zero)
    schedule = job_schedule(job)
    validate(schedule)
    assert schedule.name == "auto"
    assert schedule.ranks == simulate(job).schedule.ranks
    found = judge(job, pool.run(run_rank, 4, job), reference(job, pool))
    assert found.passed, found
    for rank, seen in enumerate(pool.run(watch, 4, job)):
        assert {k: seen.state[k] for k in STATE} == {k: rank_state(job, rank)[k] for k in STATE}, rank
        assert seen.traffic == {k: tuple(v) for k, v in step_traffic(job, rank).items()}, rank


def test_it_is_made_once_and_for_any_number_of_microbatches() -> None:
    job = uneven(1, 6, 2)
    assert job_schedule(job) is job_schedule(job)
    assert any(action.kind is Kind.INPUT for actions in job_schedule(job).ranks for action in actions)
    assert job_schedule(job, 1).microbatches == 1
    flat = replace(job, parallel=replace(job.parallel, pp=1, dp=4, stage_layers=()))
    assert job_schedule(flat).name == "1f1b"


def test_processes_make_the_same_one() -> None:
    program = (
        "import sys; from trigrid.job import load_job; from trigrid.plan.scheduled import job_schedule\n"
        "print(job_schedule(load_job(sys.argv[1], sys.argv[2:], env={})).ranks)"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", program, str(EXAMPLE), *UNEQUAL],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert "INPUT" in texts[0]


def test_it_is_proved_and_may_be_trained() -> None:
    code, out, err = run("prove", EXAMPLE, *UNEQUAL)
    assert code == 0, out + err
    assert "predicted = traced" in out
    code, out, err = run("train", EXAMPLE, *UNEQUAL, "--dry-run")
    assert code == 0, out + err
    assert 'schedule = "auto"' in out


def test_an_accelerator_that_nobody_knows_is_refused_before_any_process_starts() -> None:
    job = uneven(1, 6, 2)
    with pytest.raises(Refused, match="h1000"):
        check_schedule(replace(job, cluster=replace(job.cluster, gpu="h1000")))
