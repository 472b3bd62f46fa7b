"""Recomputation stage by stage, this engine's selective form, and dropout that keeps no mask, in the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trigrid.job import job_from_text
from trigrid.plan.layouts import job_of
from trigrid.plan.plan import make_plan, setup_of, step_for
from trigrid.plan.search import Searcher, search_layouts
from trigrid.plan.software import engine_software
from trigrid.plan.space import KNOBS, Space
from trigrid.plan.step import Step
from trigrid.report.plan import plan_text
from trigrid.report.search import layout_text
from trigrid.spec.job import Job

WORDS = ("full", "selective", "none", "selective")


def job(recompute: object = "none", **parallel: object) -> Job:
    base = job_from_text(
        '[model]\nname = "llama3-8b"\n[batch]\nsequence = 4096\nglobal_batch = 32\n[run]\nsteps = 10\n'
        "[parallel]\ntp = 2\npp = 4\ndp = 2\n"
    )
    return replace(base, parallel=replace(base.parallel, recompute=recompute, **parallel))  # type: ignore[arg-type]


def step_of(asked: Job) -> Step:
    return step_for(asked.model, asked.cluster, engine_software(asked), "bf16")


@pytest.mark.parametrize("schedule", [{}, {"schedule": "gpipe"}, {"schedule": "zb-h1"}])
def test_each_stage_is_planned_by_its_own_word(schedule: dict[str, object]) -> None:
    mixed = job(WORDS, **schedule)
    step, setup = step_of(mixed), setup_of(mixed, engine_software(mixed))
    chunks = step.pipeline(setup).stages
    for stage, word in enumerate(WORDS):
        alike = setup._replace(recompute=word)
        assert step.memory.use(setup, stage, exact=True) == step.memory.use(alike, stage, exact=True)
        assert chunks[stage] == step.pipeline(alike).stages[stage]
    peaks = {
        word: max(step.memory.device_bytes(one, step.memory.use(one, rank, exact=True)) for rank in range(4))
        for word, one in ((word, setup._replace(recompute=word)) for word in set(WORDS))
    }
    assert step.memory.peak_bytes(setup) == max(
        step.memory.device_bytes(setup, step.memory.use(setup, rank)) for rank in range(4)
    )
    # In zb-h1 what waits for weights fills the last stage, however it recomputes.
    assert peaks["full"] <= step.memory.peak_bytes(setup) < peaks["none"]


def test_stages_of_a_rank_each_have_theirs() -> None:
    """Eight stages on four ranks, the first four recomputed."""
    words = ("full",) * 4 + ("none",) * 4
    mixed = job(words, schedule="interleaved", virtual_stages=2)
    step, setup = step_of(mixed), setup_of(mixed, engine_software(mixed))
    kept = {word: step.memory.use(setup._replace(recompute=word), 1).activations for word in ("full", "none")}
    mean = sum(kept.values()) / 2
    assert mean * 0.9 < step.memory.use(setup, 1).activations < (mean + kept["none"]) / 2
    chunks = step.pipeline(setup).stages
    assert chunks[1].forward_s == chunks[5].forward_s
    assert chunks[1].input_s > chunks[5].input_s


@pytest.mark.parametrize("word", ["none", "selective", "full"])
def test_a_word_for_all_is_that_word_for_each(word: str) -> None:
    one, each = make_plan(job(word)), make_plan(job((word,) * 4))
    assert one.step_s == each.step_s
    assert [s.memory.total_bytes for s in one.stages] == [s.memory.total_bytes for s in each.stages]


def test_selective_lies_between_none_and_full() -> None:
    plans = {word: make_plan(job(word)) for word in ("none", "selective", "full")}
    times = [plans[word].step_s.best for word in ("none", "selective", "full")]
    kept = [plans[word].stages[0].memory.use.activations for word in ("full", "selective", "none")]
    assert times == sorted(times)
    assert kept == sorted(kept)
    assert times[1] < 1.05 * times[0], "what is cheap for its size costs little"
    assert kept[1] < 0.85 * kept[2]


def test_a_gathered_input_is_dropped_only_where_it_is_gathered_again() -> None:
    def kept(**layout: object) -> float:
        asked = job("selective", **layout)
        return step_of(asked).memory.use(setup_of(asked, engine_software(asked)), 0).activations

    def whole(**layout: object) -> float:
        asked = job("none", **layout)
        return step_of(asked).memory.use(setup_of(asked, engine_software(asked)), 0).activations

    tokens, in_flight, layers, hidden = 4096, 4, 8, 4096
    inputs = 2 * 2 * hidden * tokens * in_flight * layers
    gated = 2 * 14336 // 2 * tokens * in_flight * layers
    assert whole() - kept() == pytest.approx(gated)
    # With a norm's output goes what its backward would keep beside its input, a number of each token.
    assert whole(regather=True) - kept(regather=True) == pytest.approx(gated + inputs / 2, rel=1e-3)
    assert whole(sequence_parallel=False) - kept(sequence_parallel=False) == pytest.approx(gated + inputs, rel=1e-3)


def test_dropout_takes_time_and_keeps_nothing() -> None:
    plain = job()
    hidden = replace(plain, run=replace(plain.run, dropout=0.1))
    both = replace(plain, run=replace(plain.run, dropout=0.1, attention_dropout=0.1))
    plans = [make_plan(asked) for asked in (plain, hidden, both)]
    times = [p.step_s.best for p in plans]
    assert times[0] < times[1] < times[2]
    kept = [p.stages[0].memory.use.activations for p in plans]
    assert kept[0] == kept[1]
    # Probabilities in bf16 on 16 of 32 heads, instead of a number in fp32 for each query; 8 layers, 4 microbatches.
    per_query = 16 * (2 * 4096 - 4)
    assert kept[2] - kept[1] == pytest.approx(per_query * 4096 * 8 * 4)


def test_a_search_keeps_the_words_where_they_are_given() -> None:
    asked = job(WORDS)
    software = engine_software(asked)
    opened = frozenset(KNOBS) - {"recompute", "pp", "virtual_stages", "schedule"}
    found = search_layouts(asked, software, open=opened, gpus=16)
    assert found is not None
    assert {c.setup.recompute for c in found.ranked} == {WORDS}
    best = found.ranked[0].setup
    assert job_of(asked, best).parallel.recompute == WORDS
    assert "recompute full,selective,none,selective" in layout_text(best)
    space = Space(asked, frozenset({"pp", "dp"}), 16, setup_of(asked, software))
    assert {grid.pp for grid in space.grids} == {4}


def test_bounds_are_below_what_they_bound() -> None:
    asked = job(WORDS)
    software = engine_software(asked)
    setup = setup_of(asked, software)
    bounds = Searcher(Space(asked, frozenset(), 16, setup), software, None).bounds
    step = step_of(asked)
    assert bounds.step_s(setup) <= step.time(setup, play=True).step_s
    least = bounds.device_bytes(setup, bounds.state_bytes(setup), bounds.activation_bytes(setup))
    memory = step.memory
    assert least <= max(memory.device_bytes(setup, memory.use(setup, rank, exact=True)) for rank in range(4))


def test_the_report_names_the_words() -> None:
    assert "recomputation full,selective,none,selective" in plan_text(make_plan(job(WORDS)))
