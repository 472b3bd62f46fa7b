"""Shapes that do not divide: vocabularies, heads, layers, and parameters smaller than the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.jobs import named, small_job
from helpers.left_out import mask_of_the_padded_vocabulary
from helpers.torch_decoder import alone

from trigrid.blueprint import decoder
from trigrid.check.parity import Verdict, judge, run_rank
from trigrid.check.pool import Pool
from trigrid.spec.job import Batch, Job
from trigrid.spec.layout import Layout
from trigrid.spec.rules import check

BATCH = Batch(global_batch=8, sequence=12, micro_batch=1)


def job_of(layout: Layout, batch: Batch = BATCH, **model: object) -> Job:
    """The smallest model that has everything, unless `model` says otherwise."""
    job = replace(small_job(layout, **{"hidden": 8, "layers": 1, "ffn": 24, **model}), batch=batch)
    assert not check(job), check(job)[0]
    return job


def verdict(pool: Pool, job: Job, sabotage: object = None) -> Verdict:
    """Of the engine's run, against the plain decoder's in one process and one pass."""
    (wanted,) = pool.run(alone, 1, job)
    return judge(job, pool.run(run_rank, job.parallel.world, job, sabotage), wanted)


# Vocabulary

SHORT = Batch(global_batch=2, sequence=8, micro_batch=1)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab", [31, 50257, 151669])
def test_odd_vocabularies(pool: Pool, vocab: int, tp: int) -> None:
    """R34: three steps, so weights of padding that moved would be seen, too."""
    found = verdict(pool, job_of(named(f"tp{tp}", zero=0), SHORT, vocab=vocab))
    assert found.passed, found


@pytest.mark.parametrize(
    ("name", "vocab", "fields"),
    [
        ("tp4", 31, {"sequence_parallel": True}),
        ("tp2pp2", 31, {"loss_chunks": 2, "zero": 3}),
        ("tp2dp2", 31, {"loss_chunks": 3, "zero": 3}),
        ("tp4", 5, {"sequence_parallel": True, "zero": 0}),
        ("tp4", 3, {"loss_chunks": 4}),
    ],
    ids=str,
)
def test_odd_vocabularies_with_tied_embeddings(pool: Pool, name: str, vocab: int, fields: dict[str, object]) -> None:
    """R34; R66: some ranks hold nothing but padding."""
    found = verdict(pool, job_of(named(name, **fields), vocab=vocab, tied=True))
    assert found.passed, found


@pytest.mark.parametrize(("tp", "vocab"), [(2, 31), (4, 31), (4, 5)])
def test_padding_that_joins_the_softmax_is_caught(pool: Pool, tp: int, vocab: int) -> None:
    """R34: the test of vocabularies would have seen the report's fault."""
    found = verdict(pool, job_of(named(f"tp{tp}"), SHORT, vocab=vocab), mask_of_the_padded_vocabulary)
    assert not found.passed
    assert found.loss_error > 1e-3, found


# Heads

HEADS = [
    (6, 1, 2, True),
    (6, 1, 3, False),
    (6, 1, 6, True),
    (6, 2, 2, False),
    (6, 2, 6, False),
    (6, 3, 3, True),
    (6, 3, 6, True),
    (6, 6, 3, False),
    (8, 2, 4, True),
    (8, 2, 8, False),
]


@pytest.mark.parametrize(("heads", "kv_heads", "tp", "sp"), HEADS)
def test_any_tp_that_divides_the_heads(pool: Pool, heads: int, kv_heads: int, tp: int, sp: bool) -> None:
    """R36, R37: fewer KV heads than ranks, heads · head_dim that is not the hidden size, norms and biases of heads."""
    batch = replace(BATCH, sequence=24, global_batch=2) if sp else BATCH
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": 6, "qkv_bias": True, "qk_norm": True}
    found = verdict(pool, job_of(named(f"tp{tp}", sequence_parallel=sp), batch, hidden=10, **shape))
    assert found.passed, found


@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 4), (1, 2)])
def test_copied_kv_heads_with_everything_else(pool: Pool, kv_heads: int, tp: int) -> None:
    """R36, R17: under ZeRO-3 in a pipeline, a norm over weights that all, some, two or no other ranks hold."""
    layout = named(f"tp{tp}pp{4 // tp}dp2", zero=3)
    found = verdict(pool, job_of(layout, kv_heads=kv_heads, tied=True, layers=3, qk_norm=True))
    assert found.passed, found


@pytest.mark.parametrize(
    ("model", "tp", "reasons"),
    [
        ({"heads": 6, "kv_heads": 2}, 3, ["must divide model.kv_heads = 2 or be a multiple of it"]),
        ({"heads": 6, "kv_heads": 6}, 4, ["must divide model.heads = 6"]),
        ({"heads": 6, "kv_heads": 4}, 1, ["must divide model.heads = 6"]),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused(model: dict[str, int], tp: int, reasons: list[str]) -> None:
    """R36, R37: before anything runs, with the numbers and what would do."""
    job = small_job(named(f"tp{tp}"), **model)
    told = [str(problem) for problem in check(job)]
    assert [reason in text for reason, text in zip(reasons, told, strict=True)] == [True]
    assert "nearest legal" in told[0]


# Parameters smaller than the number of ranks


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(("dp8", {"zero": zero}) for zero in (0, 1, 2, 3)),
        *(("dp8", {"zero": zero, "dp_replicate": 2}) for zero in (1, 3)),
        ("dp8", {"zero": 2, "dp_replicate": 4}),
        ("dp8", {"zero": 3, "gather": "per_step"}),
        ("dp8", {"zero": 3, "prefetch": 3, "bucket_numel": 150}),
        ("dp8", {"zero": 1, "dp_replicate": 4, "bucket_numel": 10_000}),
        ("pp2dp4", {"zero": 3}),
        ("pp2dp4", {"zero": 1, "dp_replicate": 2}),
        ("tp2dp4", {"zero": 2, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_fewer_elements_than_ranks(pool: Pool, name: str, fields: dict[str, object]) -> None:
    """R66: norms of three elements; a bucket of one norm, with a tied head, leaves nothing for most ranks."""
    shape = {"hidden": 3, "heads": 2, "kv_heads": 1, "head_dim": 2, "ffn": 2, "vocab": 7, "layers": 2}
    found = verdict(pool, job_of(named(name, **fields), **shape, tied=True))
    assert found.passed, found


# Layers


@pytest.mark.parametrize(
    ("layers", "pp", "zero"),
    [(1, 1, 0), (1, 2, 1), (1, 3, 2), (2, 4, 0), (3, 2, 3), (4, 4, 0), (5, 3, 1), (5, 4, 2), (7, 8, 0), (6, 8, 1)],
)
def test_any_number_of_layers_over_any_number_of_stages(pool: Pool, layers: int, pp: int, zero: int) -> None:
    """R26, R28, R30, R46: fewer layers than stages, the first and the last without one; fewer microbatches than
    stages; tied."""
    dp = 2 if pp <= 4 else 1
    job = job_of(named(f"pp{pp}dp{dp}", zero=zero), replace(BATCH, global_batch=2 * dp), layers=layers, tied=True)
    found = verdict(pool, job)
    assert found.passed, found
    held = [unit.name for stage in range(pp) for unit in decoder(job.model).stage(job.parallel, stage)]
    assert held == [unit.name for unit in decoder(job.model).units]


def test_more_stages_than_units_are_refused() -> None:
    """R28, R88: with the number that would do."""
    (problem,) = check(small_job(named("pp8"), layers=5))
    assert str(problem) == (
        "parallel.pp = 8: more stages than units: 5 layers, the embedding and the head fill 7; nearest legal: 7"
    )
