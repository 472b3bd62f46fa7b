"""Recomputation, selective or stage by stage, changes nothing but what is kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import planted, probes
from helpers.jobs import named, small_job
from helpers.kept import kept_by_blocks
from torch.utils.flop_counter import FlopCounterMode

from trigrid.blueprint.claims import claims
from trigrid.blueprint.terms import saved_bytes
from trigrid.check.parity import batch, judge, reference, run_rank, share
from trigrid.check.pool import Pool
from trigrid.engine.comm import Comm
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.plan.software import engine_software
from trigrid.plan.traffic import step_traffic
from trigrid.spec.job import Data, Job

MODELS = {
    "plain": {},
    "tied": {"tied": True, "qkv_bias": True, "qk_norm": True},
    "gpt": {"block": "gpt", "kv_heads": 8, "tied": True},
}


def with_dropout(job: Job, hidden: float, attention: float) -> Job:
    return replace(job, run=replace(job.run, dropout=hidden, attention_dropout=attention))


@pytest.mark.parametrize(
    ("name", "model", "attention_dropout", "documents", "fields"),
    [
        ("pp2", "plain", 0.0, True, {"recompute": ("none", "selective")}),
        ("pp2dp4", "tied", 0.0, False, {"zero": 3, "recompute": "selective"}),
        ("pp4", "gpt", 0.3, True, {"zero": 2, "recompute": ("full", "selective", "none", "selective")}),
        ("tp2pp2dp2", "tied", 0.3, True, {"zero": 3, "sequence_parallel": True, "recompute": ("selective", "full")}),
        ("tp2", "tied", 0.0, True, {"zero": 3, "sequence_parallel": True, "regather": True, "recompute": "selective"}),
        ("tp2dp2", "gpt", 0.3, False, {"sequence_parallel": True, "regather": True, "recompute": "selective"}),
        ("tp4pp2", "plain", 0.3, False, {"recompute": ("selective", "none")}),
        ("tp4", "gpt", 0.0, True, {"zero": 0, "recompute": "selective"}),
        ("tp2pp2", "tied", 0.3, False, {"schedule": "zb-h1", "zero": 2, "recompute": ("full", "selective")}),
    ],
    ids=str,
)
def test_fp64(
    pool: Pool, name: str, model: str, attention_dropout: float, documents: bool, fields: dict[str, object]
) -> None:
    """Law 1 with dropout, and within documents: what is made again is what was."""
    job = with_dropout(small_job(named(name, **fields), **MODELS[model]), 0.2, attention_dropout)
    job = replace(job, data=Data(document_attention=documents))
    found = judge(job, pool.run(run_rank, job.parallel.world, job), reference(job, pool))
    assert found.passed, found


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_wrong_recomputation_is_caught(pool: Pool, recompute: str) -> None:
    job = small_job(named("tp1", recompute=recompute))
    found = judge(job, pool.run(run_rank, 1, job, planted.made_again_otherwise), reference(job, pool))
    assert found.passed == (recompute == "none"), found


LAYOUTS = [
    {"tp": 1},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "sequence_parallel": True, "regather": True},
]


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_block_keeps_what_the_claims_say(pool: Pool, model: str, layout: dict[str, object]) -> None:
    """To the byte, with what no claim names: the numbers that norms keep of each token, and the anchor of a graph."""
    cases = []
    for precision, recompute, dropout in product(
        ("fp32", "bf16"), ("none", "selective", "full"), ((0.0, 0.0), (0.1, 0.0), (0.1, 0.2))
    ):
        fields = {"sequence_parallel": False, "recompute": recompute, **layout}
        job = with_dropout(small_job(named("", **fields), precision=precision, **MODELS[model]), *dropout)
        anchor = 0 if recompute == "full" else 4
        cases.append((job, round(claimed_bytes(job) + of_norms(job)) + anchor))
    for held in pool.run(kept_by_blocks, cases[0][0].parallel.world, cases):
        assert held == [wanted for _, wanted in cases]


def claimed_bytes(job: Job) -> float:
    layout, software = job.parallel, engine_software(job)
    tokens = job.batch.micro_batch * job.batch.sequence
    sp = layout.sequence_parallel and layout.tp > 1
    if layout.recompute == "full":
        return tokens * job.model.hidden * software.policy.compute / (layout.tp if sp else 1)
    return saved_bytes(
        claims(job.model, job.model.block, software.kernels).saved,
        tokens=tokens,
        sequence=job.batch.sequence,
        tp=layout.tp,
        sequence_parallel=sp,
        compute_bytes=software.policy.compute,
        selective=layout.recompute == "selective",
    )


def of_norms(job: Job) -> float:
    """RMSNorm keeps one number in fp32; LayerNorm keeps two, in the CPU's bf16 kernel in bf16."""
    layout, model = job.parallel, job.model
    sp = layout.sequence_parallel and layout.tp > 1
    tokens = job.batch.micro_batch * job.batch.sequence
    if layout.recompute == "full":
        return 0.0
    wide = 2 if job.run.precision == "bf16" else 4
    one = 2 * wide if model.block == "gpt" else 4
    again = layout.recompute == "selective"
    halves = 0.0 if again and (not sp or layout.regather) else 2 * one / (layout.tp if sp else 1)
    heads = 4 * (model.heads + model.kv_heads) / layout.tp if model.qk_norm and not again else 0.0
    return tokens * (halves + heads)


@pytest.mark.parametrize("model", list(MODELS))
def test_no_product_runs_twice(model: str) -> None:
    """But for the scores of unfused attention, whose probabilities are made again."""

    def job(recompute: str, dropout: float = 0.0) -> Job:
        made = small_job(named("tp1", recompute=recompute), **{"layers": 2, **MODELS[model]})
        made = replace(made, batch=replace(made.batch, micro_batch=8))
        return with_dropout(made, dropout, dropout)

    plain = job("none")
    counts = {kind: flops(job(kind)) for kind in ("none", "selective", "full")}
    assert counts["none"] == counts["selective"]
    assert counts["full"] / counts["none"] == pytest.approx(4 / 3, rel=0.02)
    heads = plain.batch.global_batch * plain.model.layers * plain.model.heads
    scores = 2 * heads * plain.batch.sequence**2 * plain.model.head_dim
    assert flops(job("selective", 0.1)) - flops(job("none", 0.1)) == scores


def flops(job: Job) -> int:
    """Of one step."""
    engine = build_engine(job, Comm(grid_of(job), 0), torch.device("cpu"))
    tokens, labels = (share(rows, job, 0) for rows in batch(job, 0))
    with FlopCounterMode(display=False) as counter:
        engine.accumulate(tokens, labels, consumed=0)
    return counter.get_total_flops()


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("regather", [False, True])
def test_no_weight_outlives_its_use_and_the_traffic_is_the_plans(pool: Pool, model: str, regather: bool) -> None:
    layout = named("tp2pp2dp2", zero=3, sequence_parallel=True, regather=regather, recompute=("selective", "full"))
    job = small_job(layout, **MODELS[model])
    for rank, seen in enumerate(pool.run(probes.watch, 8, job)):
        assert not seen.survivors, (rank, seen.survivors)
        assert seen.traffic == {key: tuple(count) for key, count in step_traffic(job, rank).items()}, rank
