"""The best layout: what a search finds, proves and says about it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from trigrid.errors import Refused
from trigrid.job import job_from_text
from trigrid.plan.api import plan, search
from trigrid.plan.around import Around, reasons, recompute_table, sensitivity
from trigrid.plan.changes import changes_that_fit, nearest_batch
from trigrid.plan.found import Found
from trigrid.plan.front import LESS, SLOWEST, front, smaller
from trigrid.plan.layouts import job_of
from trigrid.plan.plan import make_plan, setup_of
from trigrid.plan.search import Searcher, search_layouts
from trigrid.plan.software import engine_software, load_software
from trigrid.plan.space import KNOBS, Space
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout

BF16 = load_software("trigrid")


def job(model: str, batch: int, sequence: int = 2048, gpu: str = "h100") -> Job:
    return job_from_text(
        f'[model]\nname = "{model}"\n[cluster]\ngpu = "{gpu}"\n'
        f"[batch]\nsequence = {sequence}\nglobal_batch = {batch}\n[run]\nsteps = 1\n"
    )


def found(base: Job, opened: frozenset[str], gpus: int) -> Found:
    result = search_layouts(base, BF16, open=opened, gpus=gpus)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("model", "batch", "gpus", "opened"),
    [
        ("llama3-8b", 16, 16, {"tp", "pp", "dp", "zero", "schedule", "virtual_stages", "recompute"}),
        ("gpt3-175b", 48, 256, {"pp", "dp", "schedule", "micro_batch", "recompute"}),
        ("mixtral-8x7b", 32, 32, {"tp", "pp", "dp", "ep", "recompute"}),
    ],
)
def test_the_winner_is_that_of_a_replay_of_everything(model: str, batch: int, gpus: int, opened: set[str]) -> None:
    base = job(model, batch)
    if "tp" not in opened:
        base = replace(base, parallel=replace(base.parallel, tp=8))
    result = found(base, frozenset(opened), gpus)
    every = [make_plan(job_of(base, setup), BF16) for setup in result.space.setups()]
    best = min(p.step_s.best for p in every if p.fits())
    assert result.plan.fits()
    assert result.plan.step_s.best == pytest.approx(best, rel=1e-9)
    assert result.chosen.step_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("model", "batch", "gpus"), [("llama3-8b", 64, 24), ("deepseek-v3", 240, 512)])
def test_no_replay_beats_a_bound(model: str, batch: int, gpus: int) -> None:
    space = Space(job(model, batch), frozenset(KNOBS), gpus, setup_of(job(model, batch), BF16))
    searcher, chance = Searcher(space, BF16), random.Random(1)
    bounds, memory = searcher.bounds, searcher.step.memory
    tried = 0
    while tried < 60:
        grid = chance.choice(space.grids)
        setup = space.setup(
            grid,
            chance.choice(space.pipings(grid.pp)),
            chance.choice(space.shardings(grid)),
            chance.choice(space.micro_batches(grid.dp)),
            chance.choice(space.recomputes),
        )
        if setup.microbatches * setup.virtual * setup.pp > 2000:
            continue
        tried += 1
        replayed = searcher.step.time(setup, play=True).step_s
        ideal = bounds.ideal_s(grid, setup.micro_batch, setup.microbatches, setup.recompute)
        assert ideal <= replayed * (1 + 1e-9)
        assert bounds.step_s(setup) + bounds.finish_s(setup) <= replayed * (1 + 1e-9)
        assert bounds.sharded_s(setup) + bounds.finish_s(setup) <= replayed * (1 + 1e-9)
        least = bounds.device_bytes(setup, bounds.state_bytes(setup), bounds.activation_bytes(setup))
        every = [memory.device_bytes(setup, memory.use(setup, rank, exact=True)) for rank in range(setup.pp)]
        assert least <= max(every) * (1 + 1e-9)


def test_a_search_counts_what_it_did_and_tells_its_front() -> None:
    result = found(job("llama3-8b", 64), frozenset(KNOBS) - {"ep"}, 16)
    counts = result.counts
    assert counts.legal == result.space.count() == len(set(result.space.setups()))
    assert 0 < counts.replayed < counts.priced < counts.legal
    assert 0 < counts.fitting < counts.priced
    assert list(result.ranked) == sorted(result.ranked)
    steps, sizes = [c.step_s for c in result.front], [c.bytes for c in result.front]
    assert steps == sorted(steps)
    assert sizes == sorted(sizes, reverse=True)
    assert result.front[0] == result.chosen
    assert result.spare_gpus == 0
    runs = result.trainable()
    assert runs is not None
    assert runs.setup.cp == runs.setup.virtual == 1


def test_no_estimate_is_told_as_faster_than_the_best() -> None:
    """Few microbatches over three ranks with a heavy head, where estimates of V shapes are below their replays."""
    base = job("llama3-70b", 512, 8192)
    base = replace(base, parallel=replace(base.parallel, pp=3, recompute="full"))
    result = found(base, frozenset(KNOBS) - {"pp", "recompute", "ep"}, 100)
    assert all(candidate.step_s >= result.chosen.step_s for candidate in result.front)
    assert result.front[0].step_s == result.chosen.step_s


def test_spare_gpus_are_told_with_the_nearest_batch_that_needs_fewer() -> None:
    base = job("llama3-8b", 64)
    base = replace(base, parallel=replace(base.parallel, tp=8, zero=1), batch=replace(base.batch, micro_batch=1))
    result = found(base, frozenset({"dp", "recompute"}), 88)
    assert (result.chosen.setup.dp, result.spare_gpus) == (8, 24)
    nearest = nearest_batch(result)
    assert nearest is not None
    size, candidate = nearest
    assert (size, candidate.setup.dp) == (66, 11)
    assert size / candidate.step_s > 64 / result.chosen.step_s


def test_where_nothing_fits_the_nearest_layout_is_told_and_what_would_fit() -> None:
    """P28, R88."""
    base = job("llama3-70b", 64)
    base = replace(base, parallel=replace(base.parallel, tp=8, zero=1, recompute="none"))
    result = found(base, frozenset({"dp", "micro_batch"}), 8)
    assert result.ranked == ()
    assert not result.plan.fits()
    assert round(result.chosen.bytes) == min(
        max(s.memory.total_bytes for s in make_plan(job_of(base, setup), BF16).stages)
        for setup in result.space.setups()
    )
    changes = changes_that_fit(result)
    assert any(change.what.endswith("GPUs") for change in changes)
    assert any("GiB" in change.what for change in changes)
    for change in changes:
        if change.what.endswith("GPUs"):
            assert make_plan(job_of(base, change.setup), BF16).fits()


def test_each_choice_has_a_reason_that_holds() -> None:
    result = found(job("llama3-8b", 64), frozenset({"tp", "dp", "recompute", "micro_batch"}), 8)
    assert result.proved
    whys = {why.knob: why for why in reasons(result)}
    assert set(whys) == {"tp", "recompute", "micro_batch"}
    around = Around(result.job, BF16, 8)
    for knob, why in whys.items():
        moves = list(around.moves(knob))
        assert all(move.value in why.reason for move in moves)
        for move in moves:
            if move.price and move.price.bytes > around.ceiling:
                assert f"{move.value} needs {move.price.bytes / 2**30:.1f} GiB of 79.1" in why.reason
            elif move.price:
                assert move.price.step_s >= around.here.step_s * (1 - 1e-9)


def test_sensitivity_goes_one_notch_each_way() -> None:
    base = job("llama3-8b", 64)
    base = replace(base, parallel=replace(base.parallel, tp=2, dp=4, zero=2), batch=replace(base.batch, micro_batch=2))
    around, moves = sensitivity(base, BF16)
    values = {(move.knob, move.value) for move in moves}
    assert {
        ("tp", "1"),
        ("tp", "4"),
        ("zero", "1"),
        ("zero", "3"),
        ("micro_batch", "1"),
        ("micro_batch", "4"),
    } <= values
    assert {("global_batch", "32"), ("global_batch", "128"), ("sequence", "1024"), ("nic_gbit", "800")} <= values
    prices = {(move.knob, move.value): move.price for move in moves}
    faster = prices["nvlink_gb_s", "900"]
    assert faster is not None
    assert faster.step_s < around.here.step_s


def test_recomputation_saves_memory_for_time_best_ratio_first() -> None:
    """P33."""
    base = job("gpt3-175b", 64)
    base = replace(base, parallel=replace(base.parallel, tp=8, pp=8))
    none, *rows = recompute_table(base, load_software("megatron-2022"))
    assert none.what == "none"
    assert rows[0].what == "selective"
    assert [row.gib_per_percent for row in rows] == sorted((row.gib_per_percent for row in rows), reverse=True)
    assert all(row.saved_bytes > 0 and row.cost > 0 for row in rows)
    assert none.bytes - rows[0].bytes == rows[0].saved_bytes


def test_what_is_gathered_again_and_pieces_of_the_loss_are_choices_of_what_to_keep() -> None:
    """P33: keys of a job that the engine runs; other trainers have their own kernels."""
    base = job("llama3-8b", 64, 8192)
    base = replace(base, parallel=replace(base.parallel, tp=8, regather=True, loss_chunks=4))
    rows = {row.what: row for row in recompute_table(base, engine_software(base))}
    assert {"none", "selective", "regather", "loss in 4 chunks", "loss in 16 chunks"} <= set(rows)
    assert rows["regather"].saved_bytes > 0
    assert rows["loss in 16 chunks"].saved_bytes > rows["loss in 4 chunks"].saved_bytes > 0
    assert all(row.cost > 0 for what, row in rows.items() if what != "none")
    none = replace(base, parallel=replace(base.parallel, regather=False, loss_chunks=1))
    assert rows["none"].step_s == make_plan(none).step_s.best
    _, moves = sensitivity(base, engine_software(base))
    assert {("regather", "false"), ("loss_chunks", "1"), ("loss_chunks", "16")} <= {(m.knob, m.value) for m in moves}
    # The engine has no word for a share of a stage's blocks.
    assert [what for what in rows if what.startswith("full")] == ["full, 100% of the blocks"]
    others = recompute_table(base, load_software("megatron"))
    assert sum(row.what.startswith("full") for row in others) == 4
    assert not any(row.what.startswith(("regather", "loss")) for row in others)


def test_from_python() -> None:
    fits = plan("llama3-8b", "h100", Layout(tp=2, dp=4), global_batch=64)
    assert fits.fits()
    assert not fits.fits(2**30)
    assert fits.setup.world == 8
    result = search("llama3-8b", "h100", gpus=16, global_batch=64, tp=2, zero=1, micro_batch=1)
    assert (result.chosen.setup.tp, result.chosen.setup.zero, result.chosen.setup.micro_batch) == (2, 1, 1)
    with pytest.raises(Refused, match=r"parallel\.tp = 3: must divide model.heads = 32"):
        plan("llama3-8b", "h100", Layout(tp=3))
    with pytest.raises(Refused, match="tensor = 3: no knob of a layout has this name"):
        search("llama3-8b", gpus=8, global_batch=8, tensor=3)


def test_the_package_itself_can_be_asked() -> None:
    import trigrid
    import trigrid.plan.memory  # what would hide a function of the package's name

    assert trigrid.plan("llama3-8b", "h100", trigrid.Layout(tp=8)).fits()
    assert trigrid.search("llama3-8b", gpus=8, global_batch=8, tp=8, recompute="none").ranked
    with pytest.raises(AttributeError, match="has no attribute 'plans'"):
        _ = trigrid.plans


def test_a_front_is_the_fastest_for_each_ceiling() -> None:
    """Against a replay of every layout; each is clearly smaller than the one before."""
    result = found(job("llama3-8b", 16), frozenset({"tp", "pp", "dp", "zero", "schedule", "recompute"}), 16)
    told = list(front(result))
    assert len(told) >= 5
    assert told[0] == result.chosen
    searcher = Searcher(result.space, BF16)
    every = [searcher.replayed(setup) for setup in result.space.setups()]
    for one, less in pairwise([*told, None]):
        assert one is not None
        within = [c.step_s for c in every if c.bytes <= LESS * one.bytes and c.step_s <= SLOWEST * told[0].step_s]
        assert (less.step_s if less else None) == (pytest.approx(min(within), rel=1e-9) if within else None)
        assert less is None or less.bytes <= LESS * one.bytes


def test_nothing_has_no_memory() -> None:
    space = found(job("llama3-8b", 16), frozenset({"zero"}), 16).space
    assert smaller(space, BF16, 0, 1e9) is None
    assert smaller(space, BF16, -1, 1e9) is None
    assert smaller(space, BF16, 2**60, 0) is None
