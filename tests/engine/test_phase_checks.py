"""The checks of a run find the faults that they are for, planted one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from helpers import left_out, planted
from helpers.jobs import named, small_job
from helpers.step_probes import engine_of, out_of_step, rows_of

from trigrid.check.parity import run_rank
from trigrid.check.pool import Pool
from trigrid.engine.units import Microbatch
from trigrid.engine.zero import Bucket
from trigrid.errors import RunFailed

TIED = {"tied": True, "qk_norm": True}


@pytest.mark.parametrize(
    ("name", "fields", "fault", "parameter"),
    [
        ("dp2", {"zero": 0}, partial(left_out.sums_over, "zero"), "layers.0.q.weight (data-parallel ranks)"),
        (
            "dp4",
            {"dp_replicate": 2},
            partial(left_out.sums_over, "replicate"),
            "layers.3.up.weight (replicas of a shard)",
        ),
        ("pp2", {"zero": 1}, partial(left_out.sums_over, "tied"), "embedding.weight (first and last stage)"),
        ("pp2dp2", {"zero": 2}, partial(left_out.sums_over, "tied"), "embedding.weight (first and last stage)"),
        ("tp4", {}, planted.kv_gradients_not_summed, "layers.2.v.weight (holders of a KV head)"),
        ("tp2", {}, partial(left_out.sums_over, "tp"), "layers.1.q_norm.weight (tensor-parallel ranks)"),
        (
            "tp2",
            {"sequence_parallel": True},
            planted.norms_not_summed_over_tp,
            "final_norm.weight (tensor-parallel ranks)",
        ),
        (
            "tp2dp2",
            {"zero": 3, "sequence_parallel": True},
            partial(left_out.sums_over, "tp"),
            "layers.5.ffn_norm.weight (tensor-parallel ranks)",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", "a sum left out") if callable(value) else str(value),
)
def test_copies_that_drift_apart_are_named(
    pool: Pool, name: str, fields: dict[str, object], fault: object, parameter: str
) -> None:
    """R06, R21, R36, R38: by the check that users switch on, and only the copies that do drift."""
    job = small_job(named(name, **fields), **TIED)
    ranks = parameter[parameter.index(" (") :]
    for run in pool.run(run_rank, job.parallel.world, job, fault):
        assert parameter in run.disagreements
        assert all(found.endswith(ranks) for found in run.disagreements)
    assert all(not run.disagreements for run in pool.run(run_rank, job.parallel.world, job, None))


@pytest.mark.parametrize(("step", "rate", "consumed"), [(2, 1e-3, 0), (1, 1.0000000000000002e-3, 0), (1, 1e-3, 8)])
def test_ranks_out_of_step_are_named(pool: Pool, step: int, rate: float, consumed: int) -> None:
    """One step ahead, a learning rate that differs in its last bit, or other samples."""
    job = small_job(named("pp2dp2"))
    for told in pool.run(out_of_step, 4, job, 2, step, rate, consumed):
        assert told.startswith(
            "ranks are out of step: rank 0: step 1, learning rate 0.001, 0 samples before it; rank 1: "
        )
        assert f"rank 2: step {step}, learning rate {rate!r}, {consumed} samples before it" in told
    assert pool.run(out_of_step, 4, job, 2, 1, 1e-3, 0) == [""] * 4


@pytest.mark.parametrize("zero", [0, 2])
def test_a_step_that_does_not_begin_clean_is_stopped(zero: int) -> None:
    """Gradients that nobody has zeroed, and a microbatch whose backward never came."""
    job = small_job(named("dp1", zero=zero))
    engine = engine_of(0, replace(job, run=replace(job.run, check_copies=True)))
    rows = rows_of(engine, 0)
    engine.step(*rows, 1e-3)
    engine.step(*rows, 1e-3)

    def counting_only(bucket: Bucket, backwards: int) -> None:
        bucket._backwards_left = backwards

    with (
        patch.object(Bucket, "start_step", counting_only),
        pytest.raises(RunFailed, match=r"rank 0: left over from the step before: gradients of embedding; "),
    ):
        engine.step(*rows, 1e-3)
    microbatch = Microbatch(rows[0][0].t(), rows[1][0].t(), torch.tensor(1.0))
    engine.stages[0].forward(microbatch.tokens_SB, 0, microbatch, keep=True)
    with pytest.raises(RunFailed, match=r"left over from the step before: microbatches of embedding; "):
        engine.step(*rows, 1e-3)
