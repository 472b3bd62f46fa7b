"""Law 1: every layout computes what the single process computes.

A spanning set of layouts; `trigrid parity examples/parity.toml` runs all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import planted
from helpers.jobs import frozen, named, small_job

from trigrid.blueprint import decoder
from trigrid.check.parity import Reference, Verdict, judge, judge_bf16, reference, run_rank
from trigrid.check.pool import Pool
from trigrid.spec.job import Data, Job

MODELS = {
    "plain": {},
    "tied": {"tied": True, "qkv_bias": True, "qk_norm": True},
    "gpt": {"block": "gpt", "kv_heads": 8, "tied": True},
}


class References:
    """The single process's run of each model, one sequence at a time, made once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._made: dict[tuple[object, ...], Reference] = {}

    def of(self, job: Job) -> Reference:
        key = (job.model, job.data, job.run.precision, job.optimizer.frozen)
        if key not in self._made:
            row_by_row = replace(job, batch=replace(job.batch, micro_batch=1))
            self._made[key] = reference(row_by_row, self._pool)
        return self._made[key]


@pytest.fixture(scope="module")
def references(pool: Pool) -> References:
    return References(pool)


def verdict(pool: Pool, references: References, job: Job, sabotage: object = None) -> Verdict:
    return judge(job, pool.run(run_rank, job.parallel.world, job, sabotage), references.of(job))


# (layout, model, sequence parallelism): each axis alone, each pair, all three; replicated KV heads from tp4 on.
SPANNING = [
    ("dp2", "tied", False),
    ("dp8", "plain", False),
    ("pp2", "tied", False),
    ("pp8", "plain", False),
    ("tp2", "tied", True),
    ("tp4", "tied", False),
    ("pp2dp4", "tied", False),
    ("pp4dp2", "tied", False),
    ("tp2dp2", "plain", True),
    ("tp2pp2", "tied", False),
    ("tp2pp2dp2", "tied", True),
    ("tp2pp2dp2", "plain", False),
    ("tp4pp2", "plain", True),
    ("tp2pp2dp2", "gpt", True),
    ("tp4", "gpt", False),
]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "model", "sp"), SPANNING, ids=[f"{n}-{m}-sp{sp:d}" for n, m, sp in SPANNING])
def test_fp64(pool: Pool, references: References, name: str, model: str, sp: bool, zero: int) -> None:
    """Also R01, R02, R04, R05, R08 (a third of the labels ignored, one microbatch and, with dp8, one rank wholly
    so), R14, R18 (the norm is clipped), R20, R21, R36, R38, R42, R54."""
    job = small_job(named(name, zero=zero, sequence_parallel=sp), **MODELS[model])
    found = verdict(pool, references, job)
    assert found.passed, found


def test_fp64_tp8(pool: Pool, references: References) -> None:
    found = verdict(pool, references, small_job(named("tp8", zero=3, sequence_parallel=True), **MODELS["tied"]))
    assert found.passed, found


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "gpipe"},
        {"recompute": "full", "zero": 3},
        {"zero": 3, "gather": "per_step"},
        {"zero": 3, "gather": "per_step", "reduce": "per_step"},
        {"zero": 1, "reduce": "per_microbatch"},
        {"stage_layers": (1, 5)},
        {"order": ("pp", "dp", "cp", "tp")},
        {"sequence_parallel": True, "regather": True, "zero": 3},
        {"sequence_parallel": True, "regather": True, "recompute": "full", "loss_chunks": 4},
        {"loss_chunks": 8, "zero": 3},
        {"zero": 3, "prefetch": 0},
        {"zero": 3, "prefetch": 3},
        {"zero": 0, "bucket_numel": 10**6},
        {"zero": 2, "bucket_numel": 9_000},
        {"zero": 3, "bucket_numel": 9_000, "recompute": "full"},
    ],
    ids=str,
)
def test_policies(pool: Pool, references: References, fields: dict[str, object]) -> None:
    """Schedules, gather and reduce policies, recomputation, uneven stages, rank order (R56), regathered inputs, logits
    in pieces (R89)."""
    found = verdict(pool, references, small_job(named("tp2pp2dp2", **fields), **MODELS["tied"]))
    assert found.passed, found


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tp2pp2dp2", {"zero": 3, "sequence_parallel": True}),
        ("tp4", {}),
        ("pp2dp2", {"recompute": "full", "zero": 2}),
    ],
)
def test_attention_within_documents(pool: Pool, references: References, name: str, fields: dict[str, object]) -> None:
    job = replace(small_job(named(name, **fields)), data=Data(document_attention=True))
    found = verdict(pool, references, job)
    assert found.passed, found
    everywhere = references.of(replace(job, data=Data())).losses
    assert all(a != b for a, b in zip(references.of(job).losses, everywhere, strict=True))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("pp2dp2", {"zero": 3}),
        ("pp4", {"zero": 1}),
        ("tp2pp2", {"zero": 0, "sequence_parallel": True}),
        ("dp4", {"zero": 2, "dp_replicate": 2}),
    ],
)
def test_paths_of_the_other_backend(pool: Pool, references: References, name: str, fields: dict[str, object]) -> None:
    """R50: groups and channels are connected in one order before the first step."""
    job = small_job(named(name, **fields), **MODELS["tied"])
    found = verdict(pool, references, job, planted.the_other_backend)
    assert found.passed, found


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_replicated_shards(pool: Pool, references: References, zero: int) -> None:
    """HSDP: dp = 2 copies × 2 shards (R06)."""
    layout = named("pp2dp4", zero=zero, dp_replicate=2)
    found = verdict(pool, references, small_job(layout, **MODELS["tied"]))
    assert found.passed, found


@pytest.mark.parametrize("model", ["plain", "tied"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tp2pp2dp2", {"zero": 0, "sequence_parallel": True}),
        ("pp4dp2", {"zero": 1}),
        ("dp2", {"zero": 2, "bucket_numel": 10**6}),
        ("tp2dp2", {"zero": 3, "recompute": "full"}),
        ("pp2dp4", {"zero": 3, "dp_replicate": 2, "bucket_numel": 9_000}),
    ],
)
def test_partly_frozen(pool: Pool, references: References, name: str, fields: dict[str, object], model: str) -> None:
    """R57: recomputation, ZeRO-3 and frozen parameters. What is frozen keeps its values and has no gradient; with pp4
    the first stage may have nothing to train at all."""
    job = frozen(small_job(named(name, **fields), **MODELS[model]))
    found = verdict(pool, references, job)
    assert found.passed, found
    known = references.of(job)
    trained = set(known.gradients[0])
    assert set(known.weights) - trained == {
        n for n in known.weights if n.startswith(("embedding.", "layers.0.")) or ("layers.2." in n and "norm" in n)
    }


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_accumulation_does_not_matter(pool: Pool, references: References, schedule: str, micro_batch: int) -> None:
    """R01, R04: equal global batches give equal gradients and norms, however they are cut into microbatches."""
    job = small_job(named("pp2dp2", schedule=schedule))
    found = verdict(pool, references, replace(job, batch=replace(job.batch, micro_batch=micro_batch)))
    assert found.passed, found


@pytest.mark.parametrize("name", ["dp2", "pp2", "tp2", "tp2pp2dp2", "pp4dp2"])
def test_fp32(pool: Pool, references: References, name: str) -> None:
    for zero in (0, 3):
        job = small_job(named(name, zero=zero), precision="fp32", **MODELS["tied"])
        found = verdict(pool, references, job)
        assert found.passed, found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bf16(pool: Pool, references: References, zero: int) -> None:
    """A layout is no farther from fp32 than 1.25 times the single process (R40: sequence parallelism on and off)."""
    for sp in (False, True):
        job = small_job(named("tp2pp2dp2", zero=zero, sequence_parallel=sp), precision="bf16")
        wide = references.of(replace(job, run=replace(job.run, precision="fp32")))
        found = judge_bf16(job, pool.run(run_rank, 8, job, None), wide, references.of(job))
        assert found.passed, found


@pytest.mark.parametrize(
    ("bug", "layout", "named_parameter"),
    [
        (planted.norms_not_summed_over_tp, {"sequence_parallel": True}, "norm"),
        (planted.tied_gradient_added_twice, {}, "embedding.weight"),
        (planted.mean_of_means, {}, ""),
        (planted.bucket_boundary_off_by_one, {}, ""),
    ],
)
@pytest.mark.parametrize("zero", [1, 3])
def test_planted_bugs_are_caught(
    pool: Pool,
    references: References,
    bug: object,
    layout: dict[str, object],
    named_parameter: str,
    zero: int,
) -> None:
    job = small_job(named("tp2pp2dp2", zero=zero, **layout), **MODELS["tied"])
    found = verdict(pool, references, job, bug)
    assert not found.passed
    assert found.gradient_error > 1e-6 or found.weight_error > 1e-6, found
    assert named_parameter in found.parameter, found
    assert found.parameter in decoder(job.model).parameters, found


def test_planted_kv_bug_is_caught(pool: Pool, references: References) -> None:
    """R36: KV heads on more ranks than there are heads."""
    job = small_job(named("tp4"), **MODELS["tied"])
    found = verdict(pool, references, job, planted.kv_gradients_not_summed)
    assert not found.passed
    assert ".k." in found.parameter or ".v." in found.parameter or "k_norm" in found.parameter, found
