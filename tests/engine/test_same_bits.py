"""Bits that must be the same: run after run, rank after rank, and wherever only the place of the work differs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.jobs import named, small_job
from helpers.step_probes import bits, initial_weights, memory_full_of_nan

from trigrid.blueprint import decoder
from trigrid.blueprint.parameters import localise
from trigrid.check.parity import squared_errors
from trigrid.check.pool import Pool
from trigrid.engine.random import draw
from trigrid.spec.layout import Layout

TIED = {"tied": True, "qk_norm": True}


@pytest.mark.parametrize(
    ("name", "fields", "precision"),
    [
        ("dp4", {"zero": 3}, "fp32"),
        ("dp4", {"zero": 0}, "bf16"),
        ("dp4", {"zero": 3, "dp_replicate": 2}, "fp32"),
        ("pp4", {"zero": 1, "schedule": "gpipe"}, "fp32"),
        ("pp2dp4", {"zero": 3, "gather": "per_step"}, "bf16"),
        ("tp4", {"zero": 0, "sequence_parallel": True, "regather": True}, "fp32"),
        ("tp2pp2dp2", {"zero": 3, "recompute": "full", "loss_chunks": 4}, "fp32"),
        ("tp2pp2dp2", {"zero": 1, "sequence_parallel": True}, "bf16"),
        ("pp2dp2", {"zero": 3, "schedule": "zbv", "virtual_stages": 2}, "fp32"),
    ],
    ids=str,
)
def test_twice_the_same(pool: Pool, name: str, fields: dict[str, object], precision: str) -> None:
    """R12: losses, norms and weights. R20, R53: every rank reports the same loss and the same norm."""
    job = small_job(named(name, **fields), precision=precision, **TIED)
    first, second = (pool.run(bits, job.parallel.world, job) for _ in range(2))
    assert first == second
    assert len({(rank.losses, rank.norms) for rank in first}) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_has_the_losses_of_one_process(pool: Pool, tied: bool) -> None:
    """R12: microbatches are added up in the same order on any number of stages, so the log does not change by a bit.

    Without clipping: the norm is a sum over stages, which rounds otherwise.
    """
    job = small_job(named("pp1"), precision="fp32", tied=False)
    job = replace(job, optimizer=replace(job.optimizer, clip_norm=0.0), model=replace(job.model, tied=tied))
    (alone,) = pool.run(bits, 1, job)
    for fields in ({"pp": 2}, {"pp": 4}, {"pp": 4, "zero": 3}):
        losses = {rank.losses for rank in pool.run(bits, fields["pp"], replace(job, parallel=Layout(**fields)))}
        # A tied weight's gradient is the sum of two stages' sums, and not of all microbatches in turn.
        compared = 1 if tied else 3
        assert {tuple(loss[:compared]) for loss in losses} == {alone.losses[:compared]}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dp1", {}),
        ("pp2dp2", {"zero": 3}),
        ("tp2pp2dp2", {"zero": 2, "sequence_parallel": True, "recompute": "full"}),
        ("tp4dp2", {"zero": 1, "loss_chunks": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("block", ["llama", "gpt"])
def test_nothing_is_read_before_it_is_written(pool: Pool, name: str, fields: dict[str, object], block: str) -> None:
    """R64: in memory full of NaN every step gives its usual numbers: tables of positions, tails of shards, padding,
    buffers of messages."""
    shape = {"block": "gpt", "kv_heads": 8} if block == "gpt" else {"qk_norm": True}
    job = small_job(named(name, **fields), tied=True, vocab=31, **shape)
    clean, dirty = (pool.run(bits, job.parallel.world, job, 2, *within) for within in ((), (memory_full_of_nan,)))
    for ours, wanted in zip(dirty, clean, strict=True):
        assert ours.losses == pytest.approx(wanted.losses, rel=1e-12)
        assert ours.norms == pytest.approx(wanted.norms, rel=1e-10)
        for held, expected in zip(ours.weights, wanted.weights, strict=True):
            np.testing.assert_allclose(np.frombuffer(held), np.frombuffer(expected), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("tp2pp2dp2", {"zero": 3}), ("tp4pp2", {"zero": 1}), ("pp2dp4", {"zero": 1, "dp_replicate": 2}), ("dp8", {})],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_weights_begin_alike_on_every_layout(pool: Pool, name: str, fields: dict[str, object], precision: str) -> None:
    """R42, R24: every element on every rank that holds it, and a tied weight on both of its stages."""
    job = small_job(named(name, **fields), precision=precision, **TIED)
    drawn = {
        name: draw(localise(parameter, Layout(), 0), job.run.seed).double().numpy()
        for name, parameter in decoder(job.model).parameters.items()
    }
    held = pool.run(initial_weights, job.parallel.world, job)
    assert set(squared_errors(job, held, drawn).values()) == {0.0}


def test_sequence_parallelism_does_not_bias_the_norm_in_bf16(pool: Pool) -> None:
    """R40: the report's norm was 9.8 % off."""
    norms = {}
    for sp in (False, True):
        job = small_job(named("tp4", sequence_parallel=sp), precision="bf16", **TIED)
        norms[sp] = pool.run(bits, 4, job, 1)[0].norms[0]
    exact = pool.run(bits, 1, small_job(named("tp1"), **TIED), 1)[0].norms[0]
    assert norms[True] == pytest.approx(norms[False], rel=5e-3)
    assert norms[True] == pytest.approx(exact, rel=5e-3)
