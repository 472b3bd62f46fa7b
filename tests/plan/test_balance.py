"""The best split of layers over stages: exact, within memory, and never worse than the even one."""

from __future__ import annotations

from itertools import product
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint import split_layers
from trigrid.errors import Refused
from trigrid.job import dump_job, job_from_text, load_job
from trigrid.plan.balance import balanced_job, balanced_split
from trigrid.plan.plan import make_plan
from trigrid.spec.job import Job

JOB = Path(__file__).parents[2] / "examples" / "llama3-405b.toml"


def job(*flags: str) -> Job:
    size = ["--pp", "4", "--dp", "4", "--global-batch", "32"]
    return load_job(JOB, ["--model.name", "llama3-8b", *size, *flags], env={})


def splits(stages: int, layers: int) -> list[tuple[int, ...]]:
    """All of them; only the ends may be empty."""
    return [
        counts for counts in product(range(layers + 1), repeat=stages) if sum(counts) == layers and all(counts[1:-1])
    ]


@given(
    stages=st.integers(1, 4),
    layers=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    ends=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    speeds=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    room=st.lists(st.integers(1, 7), min_size=4, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_it_is_what_trying_all_splits_finds(
    stages: int, layers: list[int], ends: tuple[int, int], speeds: list[int], room: list[int]
) -> None:
    """Layers of any cost, stages of any speed and memory; whole numbers, so that both are exact."""

    def cost(stage: int, first: int, count: int) -> float:
        if count > room[stage]:
            return inf
        extra = (ends[0] if stage == 0 else 0) + (ends[1] if stage == stages - 1 else 0)
        return float(speeds[stage] * (sum(layers[first : first + count]) + extra))

    def prices(counts: tuple[int, ...]) -> list[float]:
        return [cost(s, sum(counts[:s]), count) for s, count in enumerate(counts)]

    every = [prices(counts) for counts in splits(stages, len(layers))]
    fitting = [row for row in every if max(row) < inf]
    found = balanced_split(stages, len(layers), cost)
    if not fitting:
        assert found is None
        return
    assert found is not None
    row, slowest = prices(found), min(map(max, fitting))
    assert (sum(found), max(row)) == (len(layers), slowest)
    least = min(sum(price * price for price in other) for other in fitting if max(other) == slowest)
    assert sum(price * price for price in row) == least


@pytest.mark.parametrize(
    "flags",
    [(), ("--schedule", "zb-h1"), ("--schedule", "gpipe"), ("--schedule", "auto"), ("--pp", "8", "--dp", "2")],
    ids=" ".join,
)
def test_no_other_split_near_it_has_a_faster_slowest_stage(flags: tuple[str, ...]) -> None:
    """Moving one layer from any stage to any other makes the slowest stage no faster, by the planner's own times."""
    asked = job(*flags)
    balance = balanced_job(asked)
    layout = balance.job.parallel
    found = layout.stage_layers or split_layers(asked.model.layers, layout.stages)
    assert balance.proved
    assert balance.slowest_s <= balance.before_s
    assert max(chunk.total_s for chunk in make_plan(balance.job).time.pipeline.stages) == balance.slowest_s
    for giver, taker in product(range(layout.pp), repeat=2):
        counts = list(found)
        counts[giver], counts[taker] = counts[giver] - 1, counts[taker] + 1
        if giver == taker or min(counts) < 1:
            continue
        moved = job(*flags, "--parallel.stage_layers", str(counts))
        assert max(chunk.total_s for chunk in make_plan(moved).time.pipeline.stages) >= balance.slowest_s


def test_a_heavy_head_gets_fewer_layers_and_the_step_shrinks() -> None:
    """Llama-3 8B: a vocabulary of 128,256 makes the head as dear as some two layers."""
    before, balance = job(), balanced_job(job())
    assert balance.before == (8, 8, 8, 8)
    assert balance.job.parallel.stage_layers[-1] < 8
    assert balance.slowest_s < balance.before_s
    assert make_plan(balance.job).time.step_s < make_plan(before).time.step_s
    assert job_from_text(dump_job(balance.job)) == balance.job


def test_memory_bounds_the_split() -> None:
    """1F1B keeps most in flight on the first stage, which must take fewer layers than its time would allow."""
    flags = ("--parallel.recompute", "selective", "--seq", "8192", "--micro-batch", "4", "--tp", "2")
    flags = (*flags, "--global-batch", "64")
    free = balanced_job(job(*flags, "--gpu", "h200")).job.parallel.stage_layers
    tight = balanced_job(job(*flags, "--gpu", "a100-80g")).job
    assert not make_plan(job(*flags, "--gpu", "a100-80g", "--parallel.stage_layers", str(list(free)))).fits()
    assert make_plan(tight).fits()
    assert tight.parallel.stage_layers[0] < free[0]


def test_what_fits_in_no_split_is_refused() -> None:
    with pytest.raises(Refused, match=r"parallel.stage_layers = balance: no split fits the accelerator's memory"):
        balanced_job(job("--parallel.recompute", "none", "--seq", "8192", "--micro-batch", "8", "--tp", "1"))


def test_several_stages_a_rank_and_none_at_all() -> None:
    """Interleaved and V shapes balance chunks; a single stage has nothing to balance."""
    for flags in [("--schedule", "interleaved", "--virtual", "2"), ("--schedule", "zbv", "--virtual", "2")]:
        balance = balanced_job(job(*flags))
        assert balance.slowest_s <= balance.before_s
        assert make_plan(balance.job).fits()
    alone = job("--pp", "1")
    assert balanced_job(alone).job == alone
