"""The jobs that parity runs: every layout, and every two options together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.jobs import small_job

from trigrid.check.matrix import choose, options_name
from trigrid.check.pairs import OPTIONS, Pair, covering, pairs, value_at
from trigrid.errors import Refused
from trigrid.schedule import make_schedule
from trigrid.schedule.files import write_schedule
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout
from trigrid.spec.rules import check, check_trainable


@pytest.fixture(scope="module")
def base() -> Job:
    job = small_job(Layout(), layers=8)
    return replace(job, batch=replace(job.batch, global_batch=24))


@pytest.fixture(scope="module")
def jobs(base: Job) -> list[Job]:
    return choose(base, "all", "0,1,2,3", 8, OPTIONS, lambda _: None)


def test_every_legal_layout_of_up_to_eight_processes_is_there(base: Job, jobs: list[Job]) -> None:
    degrees = {(j.parallel.tp, j.parallel.pp, j.parallel.dp, j.parallel.zero) for j in jobs}
    for world in range(1, 9):
        for tp in range(1, world + 1):
            for pp in range(1, world // tp + 1):
                if world % (tp * pp):
                    continue
                for zero in range(4):
                    layout = Layout(tp=tp, pp=pp, dp=world // tp // pp, zero=zero)
                    legal = not check(replace(base, parallel=layout))
                    assert ((tp, pp, layout.dp, zero) in degrees) == legal, layout
    assert len(jobs) <= 400


def test_every_job_can_run(jobs: list[Job]) -> None:
    for job in jobs:
        assert not check(job)
        assert not check_trainable(job)


def test_every_pair_of_choices_meets_where_both_have_an_effect(jobs: list[Job]) -> None:
    """Those that never meet cannot: they are all listed here, by reason."""
    met: set[Pair] = set().union(*(pairs(job) for job in jobs))
    degrees = {axis: {getattr(job.parallel, axis) for job in jobs} for axis in ("tp", "pp", "dp", "zero")}
    values = {key: set(choices) for key, choices in OPTIONS.items()}
    keys = sorted(values | degrees)
    missing = {
        ((one, a), (other, b))
        for place, one in enumerate(keys)
        for other in keys[place + 1 :]
        if one in OPTIONS or other in OPTIONS
        for a in (values | degrees)[one]
        for b in (values | degrees)[other]
    } - met
    for pair in missing:
        assert any(reason(dict(pair)) for reason in IMPOSSIBLE), pair


# ZeRO's options need two ranks or more along dp, TP's along tp, schedules along pp; at most eight processes; 24
# sequences; eight layers; blocks of GPT have biases and as many KV heads as heads.
OF_TP = ("parallel.sequence_parallel", "parallel.regather")
OF_DP = tuple(f"parallel.{name}" for name in ("gather", "reduce", "dp_replicate", "bucket_numel", "prefetch"))
OF_PP = ("parallel.schedule", "parallel.virtual_stages")
LEAST = {**dict.fromkeys(OF_TP, "tp"), **dict.fromkeys(OF_DP, "dp"), **dict.fromkeys(OF_PP, "pp")}


def _too_many(pair: dict[str, object]) -> bool:
    """More than eight processes, or an axis of one on which nothing is cut."""
    least = {"tp": 1, "pp": 1, "dp": 1}
    for key, value in pair.items():
        if key in least:
            if any(LEAST.get(other) == key for other in pair) and value == 1:
                return True
            least[key] = max(least[key], int(str(value)))
        elif key in LEAST:
            least[LEAST[key]] = max(least[LEAST[key]], 2)
    shards = {"parallel.gather", "parallel.reduce", "parallel.prefetch"}
    if pair.get("parallel.dp_replicate") == 2 and shards & set(pair):
        least["dp"] = max(least["dp"], 4)
    return least["tp"] * least["pp"] * least["dp"] > 8


IMPOSSIBLE = [
    _too_many,
    lambda p: p.get("model.block") == "gpt" and bool({"model.kv_heads", "model.qkv_bias"} & set(p)),
    lambda p: p.get("parallel.sequence_parallel") is False and p.get("parallel.regather") is True,
    lambda p: p.get("zero") != 3 and "zero" in p and bool({"parallel.gather", "parallel.prefetch"} & set(p)),
    lambda p: p.get("zero") == 0 and "parallel.reduce" in p,
    lambda p: p.get("parallel.dp_replicate") == 2 and p.get("dp") in (1, 3),
    lambda p: "parallel.virtual_stages" in p and p.get("parallel.schedule", "interleaved") != "interleaved",
    lambda p: p.get("batch.micro_batch") == 3 and p.get("dp") in (3, 6),
    # More stages than layers.
    lambda p: p.get("parallel.virtual_stages") == 2 and p.get("pp") in (5, 6, 7, 8),
    lambda p: p.get("parallel.schedule") in ("zbv", "dualpipev") and p.get("pp") in (5, 6, 7, 8),
]


def test_a_pair_without_effect_does_not_count(base: Job) -> None:
    alone = {key for pair in pairs(base) for key, _ in pair}
    assert not alone & {*OF_TP, *OF_DP, *OF_PP}
    assert {"model.tied", "run.precision", "tp"} <= alone


def test_names_tell_what_is_not_first(base: Job) -> None:
    job = replace(base, parallel=replace(base.parallel, tp=2, sequence_parallel=False, recompute="full"))
    told = options_name(job, {key: OPTIONS[key] for key in ("parallel.sequence_parallel", "parallel.recompute")})
    assert told == "no-sequence_parallel recompute=full"
    assert value_at(job, "parallel.recompute") == "full"


def test_layouts_without_a_legal_choice_are_left_out_and_none_at_all_is_refused(base: Job) -> None:
    seven = replace(base, batch=replace(base.batch, global_batch=7))
    assert covering(seven, [Layout(dp=2)]) == []
    with pytest.raises(Refused, match="no layout of up to 1 processes"):
        choose(replace(base, batch=replace(base.batch, sequence=65)), "all", "0", 1, OPTIONS, lambda _: None)


def test_only_layouts_that_the_schedule_of_a_file_is_for_are_chosen(base: Job, tmp_path: Path) -> None:
    path = tmp_path / "made.csv"
    write_schedule(make_schedule("1f1b", 2, 24 // base.batch.micro_batch), path)
    job = replace(base, parallel=replace(base.parallel, schedule_file=str(path)))
    chosen = choose(job, "all", "1", 4, {}, lambda _: None)
    assert {(j.parallel.tp, j.parallel.pp, j.parallel.dp) for j in chosen} == {(1, 2, 1), (2, 2, 1)}
    with pytest.raises(Refused, match="microbatches, a step has"):
        choose(job, "pp2dp2", "1", 4, {}, lambda _: None)
    with pytest.raises(Refused, match="--options = pairs: pairs vary schedule and batch"):
        choose(job, "all", "1", 4, OPTIONS, lambda _: None)
