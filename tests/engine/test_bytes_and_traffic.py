"""Law 2, as far as state and communication go: predicted = measured, on real processes."""

from __future__ import annotations

import pytest
from helpers.jobs import frozen, named, small_job
from helpers.probes import Seen, count_unfinished_sends, watch

from trigrid.check.pool import Pool
from trigrid.ledger import STATE
from trigrid.plan.state import rank_state
from trigrid.plan.traffic import step_traffic
from trigrid.spec.job import Job
from trigrid.spec.precision import FORMAT_BYTES, PRECISIONS


def jobs() -> list[Job]:
    """TP2 × PP2 × DP2 under every ZeRO stage, and what is special elsewhere."""
    made = [
        small_job(named("tp2pp2dp2", zero=zero), precision=precision)
        for zero in (0, 1, 2, 3)
        for precision in ("bf16", "fp32")
    ]
    made += [
        small_job(named("tp2pp2dp2", zero=3, recompute="full", sequence_parallel=True), tied=True),
        small_job(named("tp2pp2dp2", zero=3, gather="per_step"), precision="bf16"),
        small_job(named("tp4dp2", zero=2, sequence_parallel=True), tied=True, qk_norm=True, precision="bf16"),
        small_job(named("pp4dp2", schedule="gpipe"), tied=True),
        small_job(named("tp2pp2", regather=True, loss_chunks=4, sequence_parallel=True)),
        small_job(named("tp2dp2", zero=2), block="gpt", kv_heads=8),
        small_job(named("dp4", zero=1, dp_replicate=2), tied=True),
        *(small_job(named("pp2dp2", zero=zero, bucket_numel=9_000), tied=True, precision="bf16") for zero in (0, 2, 3)),
        *(frozen(small_job(named("tp2pp2dp2", zero=zero), tied=True, precision="bf16")) for zero in (0, 1, 3)),
        frozen(small_job(named("dp2", zero=3, bucket_numel=9_000, recompute="full"), precision="bf16")),
    ]
    return made


def label(job: Job) -> str:
    layout = job.parallel
    return f"tp{layout.tp}pp{layout.pp}dp{layout.dp}-z{layout.zero}-{layout.gather}-{job.run.precision}"


@pytest.mark.parametrize("job", jobs(), ids=label)
def test_predicted_equals_measured(pool: Pool, job: Job) -> None:
    """State bytes from live storages, collective calls and bytes, on every rank; R54: ZeRO-1, 2 and 3 under a
    pipeline."""
    for rank, seen in enumerate(pool.run(watch, job.parallel.world, job)):
        assert {k: seen.state[k] for k in STATE} == {k: rank_state(job, rank)[k] for k in STATE}, rank
        assert seen.traffic == {k: tuple(v) for k, v in step_traffic(job, rank).items()}, rank
        assert not seen.survivors, rank


@pytest.fixture(scope="module")
def by_stage(pool: Pool) -> dict[int, list[Seen]]:
    """What each rank of TP2 × PP2 × DP2 saw in bf16, by ZeRO stage."""
    return {zero: pool.run(watch, 8, bf16(zero)) for zero in (0, 1, 2, 3)}


def bf16(zero: int) -> Job:
    return small_job(named("tp2pp2dp2", zero=zero), precision="bf16")


def test_gradients_are_never_whole_from_stage_2_on(by_stage: dict[int, list[Seen]]) -> None:
    """At no moment more than the shards and one unit's transient gradients."""
    for zero in (2, 3):
        for seen in by_stage[zero]:
            assert seen.peak["gradients"] == 4 * (seen.stage_numel // 2 + seen.largest_numel)
            assert seen.peak["gradients"] < 4 * seen.stage_numel
    for zero in (0, 1):
        for seen in by_stage[zero]:
            assert seen.peak["gradients"] == 4 * seen.stage_numel


def test_weights_are_whole_below_stage_3(by_stage: dict[int, list[Seen]]) -> None:
    for zero in (0, 1, 2):
        assert all(seen.peak["weights"] == 2 * seen.stage_numel for seen in by_stage[zero])


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_weights_are_never_whole_in_stage_3(pool: Pool, ahead: int) -> None:
    """At no moment more than one unit's gathered weights beside the fp32 shards, and those that are fetched ahead
    (R62)."""
    for seen in pool.run(watch, 8, small_job(named("tp2pp2dp2", zero=3, prefetch=ahead), precision="bf16")):
        assert seen.state["weights"] == 0
        assert seen.peak["weights"] == 2 * (1 + ahead) * seen.largest_numel
        assert seen.peak["weights"] < 2 * seen.stage_numel


def test_volume_is_the_table_of_the_design(by_stage: dict[int, list[Seen]]) -> None:
    """2Ψ, 2Ψ, (m + 1)Ψ and 3mΨ elements per step, for Ψ parameters of a stage and m microbatches."""
    precision = PRECISIONS["bf16"]
    gather, reduce = FORMAT_BYTES[precision.gather], FORMAT_BYTES[precision.reduce]
    for zero, ranks in by_stage.items():
        job = bf16(zero)
        m = job.batch.microbatches(job.parallel)
        assert m == 2
        for seen in ranks:
            psi = seen.stage_numel
            wanted = {
                0: 2 * psi * reduce,
                1: psi * reduce + psi * gather,
                2: m * psi * reduce + psi * gather,
                3: m * psi * reduce + 2 * m * psi * gather,
            }[zero]
            assert seen.volume_bytes == wanted


def test_optimizer_state_falls_with_dp(by_stage: dict[int, list[Seen]]) -> None:
    for zero in (1, 2, 3):
        for seen, whole in zip(by_stage[zero], by_stage[0], strict=True):
            assert seen.state["master"] * 2 == whole.state["master"]
            assert abs(seen.state["optimizer"] * 2 - whole.state["optimizer"]) <= 64


def test_survivors_are_named(pool: Pool) -> None:
    """A unit that keeps a gathered weight is found out: the census is tested too."""
    job = small_job(named("dp2", zero=3))
    for seen in pool.run(watch, 2, job, "layers.2"):
        assert seen.survivors == {"layers.2"}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_at_most_one_send_of_a_channel_is_under_way(pool: Pool, schedule: str) -> None:
    """What the validator assumes of the interpreter; more would keep one activation alive per send."""
    assert set(pool.run(count_unfinished_sends, 4, small_job(named("pp4", schedule=schedule)))) == {1}
