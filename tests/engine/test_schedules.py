"""Every schedule trains what the single process trains, moves what is predicted, and computes nothing twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.jobs import named, small_job
from helpers.kept import queued_by_block
from helpers.probes import evaluate_and_train, flops_of_a_step, most_in_flight, one_step_each, shared_storages, watch

from trigrid.check.parity import Reference, judge, reference, run_rank, single
from trigrid.check.pool import Pool
from trigrid.errors import Refused
from trigrid.ledger import STATE
from trigrid.plan.constants import shipped
from trigrid.plan.memory import Memory
from trigrid.plan.plan import setup_of
from trigrid.plan.scheduled import job_schedule
from trigrid.plan.software import engine_software
from trigrid.plan.state import rank_state
from trigrid.plan.traffic import step_traffic
from trigrid.schedule import Action, Kind, Schedule, in_flight, make_schedule, validate, write_schedule
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout


class References:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._made: dict[Job, Reference] = {}

    def of(self, job: Job) -> Reference:
        if (key := single(job)) not in self._made:
            self._made[key] = reference(job, self._pool)
        return self._made[key]


@pytest.fixture(scope="module")
def references(pool: Pool) -> References:
    return References(pool)


def many_layers(layout: Layout, microbatches: int, **model: object) -> Job:
    """One layer for each of up to 24 stages, `microbatches` of one sequence for each data-parallel rank."""
    job = small_job(layout, **{"layers": 24, "hidden": 16, "head_dim": 2, "ffn": 24, **model})
    return replace(job, batch=replace(job.batch, global_batch=layout.dp * microbatches, micro_batch=1, sequence=8))


def samples() -> Iterator[tuple[str, int, int, int, int]]:
    """(schedule, pp, virtual stages, microbatches, ZeRO stage): each schedule, pp and v with a ZeRO stage and a number
    of microbatches of 1 … 2·p·v drawn once and for all."""
    draw = random.Random(7)
    for schedule, chunks in (
        *((name, (1,)) for name in ("gpipe", "1f1b", "zb-h1")),
        ("interleaved", (1, 2, 3)),
        *((name, (2,)) for name in ("zbv", "dualpipev")),
    ):
        for pp in (2, 3, 4, 8):
            for v in chunks:
                yield schedule, pp, v, draw.randint(1, 2 * pp * v), draw.randrange(4)


@pytest.mark.parametrize(("schedule", "pp", "v", "m", "zero"), list(samples()))
def test_parity(pool: Pool, references: References, schedule: str, pp: int, v: int, m: int, zero: int) -> None:
    """R46: with fewer microbatches than stages, too; R52: PP = 2 with VP = 2; R22: a tied weight whose two stages share
    a rank in V shapes is there once. Two data-parallel ranks wherever eight processes are enough, one layer a stage."""
    layout = named(f"pp{pp}dp{2 if pp <= 4 else 1}", schedule=schedule, virtual_stages=v, zero=zero)
    job = many_layers(layout, m, layers=pp * v, tied=True)
    found = judge(job, pool.run(run_rank, layout.world, job), references.of(job))
    assert found.passed, found


CUTS = [
    {"schedule": "zb-h1", "zero": 3, "bucket_numel": 9_000},
    {"schedule": "zbv", "virtual_stages": 2, "zero": 3, "sequence_parallel": True, "regather": True},
    {"schedule": "zbv", "virtual_stages": 2, "zero": 2, "recompute": "full", "sequence_parallel": True},
    {"schedule": "interleaved", "virtual_stages": 3, "zero": 3, "recompute": "selective"},
    {"schedule": "zb-h1", "zero": 1, "recompute": ("full", "selective"), "loss_chunks": 4},
]


@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_with_other_cuts(pool: Pool, references: References, fields: dict[str, object]) -> None:
    job = small_job(named("tp2pp2dp2", **fields), tied=True)
    found = judge(job, pool.run(run_rank, 8, job), references.of(job))
    assert found.passed, found


@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_state_and_traffic_are_as_predicted(pool: Pool, fields: dict[str, object]) -> None:
    job = small_job(named("tp2pp2dp2", **fields), tied=True, precision="bf16")
    for rank, seen in enumerate(pool.run(watch, 8, job)):
        assert {k: seen.state[k] for k in STATE} == {k: rank_state(job, rank)[k] for k in STATE}, rank
        assert seen.state["weight_queue"] == 0
        assert seen.traffic == {k: tuple(v) for k, v in step_traffic(job, rank).items()}, rank
        assert not seen.survivors, rank


def test_a_step_costs_the_same_operations_under_every_schedule(pool: Pool) -> None:
    """No matrix product is made twice: counted by torch over all ranks."""
    counted = {}
    for schedule, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)):
        job = many_layers(named("pp4", schedule=schedule, virtual_stages=v), 8)
        counted[schedule] = sum(pool.run(flops_of_a_step, 4, job))
    assert len(set(counted.values())) == 1, counted


@pytest.mark.parametrize("model", [{}, {"block": "gpt", "kv_heads": 8}], ids=["llama", "gpt"])
@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "full"},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
        {"tp": 2, "sequence_parallel": True, "regather": True},
    ],
    ids=str,
)
def test_the_queue_keeps_what_the_planner_counts(
    pool: Pool, model: dict[str, object], fields: dict[str, object]
) -> None:
    """Each product's input, once where products share it, and the gradient of its output."""
    job = small_job(named("pp2", schedule="zb-h1", **fields), **model)
    software = engine_software(job)
    planned = Memory(job.model, software, shipped()).unit(job.model.block, setup_of(job, software).cut, "none")
    assert pool.run(queued_by_block, job.parallel.world, job)[0] == planned.for_weights


@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)])
def test_no_more_is_in_flight_than_the_schedule_promises(pool: Pool, schedule: str, v: int) -> None:
    """What a rank keeps of activations and in the queue of weight gradients is what the planner counts; zb-h1 keeps no
    more than 1f1b's first rank, p microbatches, on any."""
    job = many_layers(named("pp4", schedule=schedule, virtual_stages=v), 10)
    promised = in_flight(job_schedule(job))
    assert pool.run(most_in_flight, 4, job) == [tuple(rank) for rank in promised]
    if schedule == "zb-h1":
        assert all(rank.until_input <= 4 for rank in promised)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_chunks_of_a_rank_share_nothing(pool: Pool, schedule: str) -> None:
    """But a tied weight where the first and the last stage are on one rank."""
    for tied in (False, True):
        job = small_job(named("pp2dp2", schedule=schedule, virtual_stages=2, zero=1), tied=tied)
        both_ends = [["embedding.weight"] if tied and schedule == "zbv" and at == 0 else [] for at in (0, 1)]
        # Ranks of one stage are one after the other along data parallelism, the outer axis.
        assert pool.run(shared_storages, 4, job) == both_ends * 2


def test_loss_is_known_on_every_rank(pool: Pool) -> None:
    """R53, for V shapes, where the last stage is on the first rank."""
    for schedule in ("zbv", "interleaved"):
        job = small_job(named("pp2dp2", schedule=schedule, virtual_stages=2, zero=3))
        results = pool.run(evaluate_and_train, 4, job)
        assert len({loss for loss, _ in results}) == 1
        assert results[0][0] == pytest.approx(results[0][1], rel=1e-14)


# Schedules from files


def shuffled(pp: int, m: int, placement: tuple[int, ...], draw: random.Random) -> Schedule:
    """A random schedule: at each turn any rank does anything that may come next; some backwards are split."""
    ready: list[Action] = [Action(Kind.FORWARD, 0, i) for i in range(m)]
    ranks: list[list[Action]] = [[] for _ in range(pp)]
    last = len(placement) - 1
    while ready:
        action = ready.pop(draw.randrange(len(ready)))
        kind, stage, i = action
        ranks[placement[stage]].append(action)
        if kind is Kind.FORWARD:
            if stage < last:
                ready.append(Action(Kind.FORWARD, stage + 1, i))
            else:
                ready.append(Action(draw.choice((Kind.BACKWARD, Kind.INPUT)), stage, i))
        elif kind is not Kind.WEIGHT:
            if stage > 0:
                ready.append(Action(draw.choice((Kind.BACKWARD, Kind.INPUT)), stage - 1, i))
            if kind is Kind.INPUT:
                ready.append(Action(Kind.WEIGHT, stage, i))
    return Schedule("shuffled", m, placement, tuple(map(tuple, ranks)))


@pytest.mark.parametrize(("pp", "v"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 1)])
def test_random_schedules_run(pool: Pool, tmp_path: Path, pp: int, v: int) -> None:
    """R49, R50: 200 random schedules that the validator lets pass run without a deadlock; each gives the same loss and
    norm."""
    draw, jobs = random.Random(11), []
    while len(jobs) < 40:
        path = tmp_path / f"{len(jobs)}.csv"
        layout = named(f"pp{pp}", schedule="interleaved", virtual_stages=v, schedule_file=str(path), zero=0)
        write_schedule(shuffled(pp, 4, layout.placement, draw), path)
        jobs.append(many_layers(layout, 4))
    for job in jobs:
        validate(job_schedule(job))
    for seen in pool.run(one_step_each, pp, jobs):
        for loss, norm in seen:
            assert loss == pytest.approx(seen[0][0], rel=1e-13)
            assert norm == pytest.approx(seen[0][1], rel=1e-11)


def test_a_random_schedule_agrees_with_one_process(pool: Pool, references: References, tmp_path: Path) -> None:
    path = tmp_path / "random.json"
    layout = named("pp2dp2", schedule="zbv", virtual_stages=2, schedule_file=str(path), zero=3)
    write_schedule(shuffled(2, 4, layout.placement, random.Random(5)), path)
    job = many_layers(layout, 4, tied=True)
    found = judge(job, pool.run(run_rank, 4, job), references.of(job))
    assert found.passed, found


def test_a_deadlock_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    """Rank 0 waits for the gradient of microbatch 0 before it sends microbatch 1, for which rank 1 waits first."""
    path = tmp_path / "stuck.csv"
    first = tuple(Action(kind, 0, m) for m in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD))
    second = tuple(Action(kind, 1, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in (0, 1))
    write_schedule(Schedule("stuck", 2, (0, 1), (first, second)), path)
    job = many_layers(named("pp2", schedule="1f1b", schedule_file=str(path)), 2)
    with pytest.raises(Refused, match=r"deadlock, rank 0 at B0\.0; rank 1 at F1\.1"):
        job_schedule(job)


def test_a_schedule_of_other_places_or_another_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    write_schedule(make_schedule("zbv", 2, 4), path)
    job = many_layers(named("pp2", schedule="interleaved", virtual_stages=2, schedule_file=str(path)), 3)
    with pytest.raises(Refused) as refused:
        job_schedule(job)
    places, batch = refused.value.problems
    assert "ranks [0, 1, 1, 0]; interleaved puts its 4 stages on ranks [0, 1, 0, 1]" in str(places)
    assert "has 4 microbatches, a step has 3" in str(batch)
    assert len(job_schedule(many_layers(replace(job.parallel, schedule="zbv"), 4)).ranks) == 2
