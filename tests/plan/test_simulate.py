"""Simulated steps: the planner's own, those of a file, with stragglers, jitter and failures."""

from __future__ import annotations

from dataclasses import replace
from math import erf, log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean

import pytest

from trigrid.errors import Refused
from trigrid.grid import Coord, grid_of
from trigrid.job import load_job
from trigrid.plan.plan import make_plan
from trigrid.plan.search import search_layouts
from trigrid.plan.setup import Setup
from trigrid.plan.simulate import Simulation, simulate
from trigrid.plan.stragglers import (
    Faults,
    Replicas,
    after_stops,
    failures,
    slowed,
    statistics,
    stragglers,
)
from trigrid.report.trace import simulation_trace, write_trace
from trigrid.schedule import Action, Kind, in_flight, make_schedule, peak_bytes, write_schedule
from trigrid.spec.job import Job

JOB = Path(__file__).parents[2] / "examples" / "llama3-405b.toml"
NOTHING = Faults(slow_ranks={}, slow_links={})


def job(*flags: str) -> Job:
    """Llama-3 70B on TP 8 × PP 4 × DP 4, eight microbatches, with `flags`."""
    size = ["--pp", "4", "--dp", "4", "--global-batch", "32"]
    return load_job(JOB, ["--model.name", "llama3-70b", *size, *flags], env={})


# One step


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--schedule", "gpipe"),
        ("--schedule", "zb-h1"),
        ("--schedule", "zbv", "--virtual", "2"),
        ("--schedule", "dualpipev", "--virtual", "2"),
        ("--schedule", "interleaved", "--virtual", "3"),
        ("--schedule", "auto"),
        ("--schedule", "auto", "--virtual", "2"),
        ("--zero", "3"),
    ],
    ids=" ".join,
)
def test_the_timeline_is_the_plans_and_the_parts_sum_to_its_step(flags: tuple[str, ...]) -> None:
    asked = job(*flags)
    simulation, plan = simulate(asked), make_plan(asked)
    assert simulation.timeline.step_s == pytest.approx(plan.time.pipeline_s, rel=1e-12)
    assert simulation.timeline.bubble_ratio == pytest.approx(plan.time.bubble_ratio, rel=1e-9)
    assert simulation.step_s == pytest.approx(plan.time.step_s - plan.time.parts_s["jitter"], rel=1e-12)
    for rank, stage in enumerate(plan.stages):
        use = stage.memory.use
        assert simulation.stages.state_bytes[rank] == sum(use.state)
        peak = max(size for _, size in simulation.memory[rank])
        # The plan counts the embedding's share beside it, and of halved backwards what is there at the fullest moment.
        if rank and use.moment not in ("reduce", "optimizer"):
            assert 0.8 * use.activations <= peak <= use.activations + use.transients, rank
            whole = simulation.schedule.name in ("1f1b", "gpipe", "interleaved")
            assert not whole or peak == pytest.approx(use.activations, rel=1e-6), rank


def test_collectives_are_exposed_as_the_plan_has_it_for_the_rank_that_works_longest() -> None:
    asked = job()
    simulation, parts = simulate(asked), make_plan(asked).time.parts_s
    longest = max(range(4), key=simulation.timeline.busy_s.__getitem__)
    assert simulation.exposed_s(longest)["tp"] == pytest.approx(parts["tp"], rel=1e-12)
    assert sum(simulation.waits[longest]) == pytest.approx(simulation.timeline.idle_s[longest])


def test_without_a_pipeline_microbatches_follow_each_other() -> None:
    simulation = simulate(job("--pp", "1", "--tp", "8"))
    assert simulation.timeline.idle_share == pytest.approx(0, abs=1e-12)
    assert len(simulation.timeline.spans) == 16


def test_auto_stays_in_memory_and_is_faster_than_what_fits_beside_it() -> None:
    plans = {name: make_plan(job("--schedule", name)) for name in ("1f1b", "auto")}
    assert plans["auto"].fits()
    assert plans["auto"].time.step_s < plans["1f1b"].time.step_s
    auto = simulate(job("--schedule", "auto")).auto
    assert auto is not None
    assert auto.bound_s <= auto.step_s <= auto.named_s
    assert any("above what no schedule can beat" in line for line in plans["auto"].assumptions)
    assert sum(plans["auto"].time.parts_s.values()) == pytest.approx(plans["auto"].time.step_s)


def test_auto_for_what_does_not_fit_holds_no_more_than_1f1b() -> None:
    large = job("--schedule", "auto", "--parallel.recompute", "none", "--zero", "0", "--tp", "1", "--seq", "4096")
    auto = make_plan(large)
    named = make_plan(replace(large, parallel=replace(large.parallel, schedule="1f1b")))
    assert not named.fits()
    assert not auto.fits()
    for mine, theirs in zip(auto.stages, named.stages, strict=True):
        # But for what a weight backward has of its own, which is no microbatch under way, and the allocator's part.
        own, others = (
            held.memory.total_bytes - held.memory.ledger["transients"] - held.memory.ledger["allocator"]
            for held in (mine, theirs)
        )
        assert own <= others * (1 + 1e-9)
        assert mine.memory.use.activations <= theirs.memory.use.activations * (1 + 1e-9)


# Times and schedules from files


def test_times_of_a_file_take_the_place_of_the_planners(tmp_path: Path) -> None:
    file = tmp_path / "times.csv"
    rows = [f"{stage},{kind},{took}" for stage in range(4) for kind, took in (("F", 1), ("I", 1), ("W", 1))]
    file.write_text("\n".join(["stage,kind,seconds", *rows]))
    simulation = simulate(job(), durations=file)
    assert (simulation.timeline.step_s, simulation.timeline.bubble_ratio) == (33, pytest.approx(3 / 8))
    assert simulation.given
    assert set(simulation.exposed_s(0).values()) == {0}
    zero_bubble = simulate(job("--schedule", "zb-h1"), durations=file)
    assert zero_bubble.timeline.step_s == 8 * 3 + 3
    assert simulate(job("--schedule", "auto"), durations=file).timeline.step_s <= 33
    file.write_text("stage,kind,seconds\n" + "".join(f"{s},F,1\n{s},B,2\n" for s in range(4)))
    assert simulate(job(), durations=file).timeline.step_s == 33
    whole = simulate(job("--schedule", "auto"), durations=file).schedule
    assert {action.kind for line in whole.ranks for action in line} == {Kind.FORWARD, Kind.BACKWARD}
    with pytest.raises(Refused, match="schedule zb-h1 takes backwards in halves: I and W are needed of every stage"):
        simulate(job("--schedule", "zb-h1"), durations=file)


def test_times_of_a_run_are_those_that_it_recorded(tmp_path: Path) -> None:
    """A trace of a step whose times are known, halves apart; then any schedule plays with them."""
    known = equal(tmp_path, "--schedule", "zb-h1", p2p=0.125)
    trace = replace(simulation_trace(known), facts={"step": 3})
    write_trace(trace, tmp_path / "trace.json")
    for path in (tmp_path, tmp_path / "trace.json"):
        again = simulate(job("--schedule", "zb-h1"), durations=path)
        assert again.timeline.step_s == pytest.approx(known.timeline.step_s)
        assert again.durations.p2p_s == pytest.approx((0.125,) * 3)
    auto, named = (simulate(job("--schedule", name), durations=tmp_path).step_s for name in ("auto", "1f1b"))
    assert auto < named
    with pytest.raises(Refused, match="cannot be read: No such file"):
        simulate(job(), durations=tmp_path / "other.json")


def test_a_schedule_of_a_file_must_go_with_the_job(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    write_schedule(make_schedule("zb-h1", 4, 8), file)
    assert simulate(job(), schedule=file).schedule.ranks == make_schedule("zb-h1", 4, 8).ranks
    assert simulate(job("--parallel.schedule_file", str(file))).schedule.name == "zb-h1"
    wanted = r"schedule-file = .*: has 8 microbatches, a step has 16; nearest legal: batch.global_batch = 32"
    with pytest.raises(Refused, match=wanted):
        simulate(job("--global-batch", "64"), schedule=file)
    write_schedule(make_schedule("zbv", 4, 8), file)
    wanted = r"8 stages on ranks \[0, 1, 2, 3, 3, 2, 1, 0\]; 1f1b puts its 4 stages on ranks \[0, 1, 2, 3\]"
    with pytest.raises(Refused, match=wanted):
        simulate(job(), schedule=file)
    assert simulate(job("--schedule", "zbv", "--virtual", "2"), schedule=file).schedule.stages == 8


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", "1"), ("zb-h1", "1"), ("gpipe", "1"), ("zbv", "2")])
@pytest.mark.parametrize("flags", [(), ("--parallel.recompute", "none", "--zero", "0")], ids=["full", "none"])
def test_a_plan_prices_the_schedule_of_a_file(tmp_path: Path, name: str, virtual: str, flags: tuple[str, ...]) -> None:
    """As the planner prices the same schedule by its name."""
    file = tmp_path / "own.csv"
    write_schedule(make_schedule(name, 4, 8), file)
    stated = "zbv" if name == "zbv" else "interleaved"
    own = job("--schedule", stated, "--virtual", virtual, "--parallel.schedule_file", str(file), *flags)
    plan, named = make_plan(own), make_plan(job("--schedule", name, "--virtual", virtual, *flags))
    assert plan.job is own
    assert plan.time.pipeline_s == pytest.approx(named.time.pipeline_s, rel=1e-9)
    assert plan.time.step_s == pytest.approx(named.time.step_s, rel=1e-3)
    assert sum(plan.time.parts_s.values()) == pytest.approx(plan.time.step_s)
    assert plan.time.bubble_ratio == pytest.approx(named.time.bubble_ratio, rel=1e-9)
    for mine, theirs in zip(plan.stages, named.stages, strict=True):
        assert mine.memory.total_bytes == pytest.approx(theirs.memory.total_bytes, rel=0.02)
    assert f"schedule replayed as it is in {file}" in plan.assumptions
    assert simulate(own).timeline.step_s == pytest.approx(plan.time.pipeline_s, rel=1e-12)


def test_a_file_that_is_not_for_the_job_is_not_planned(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    write_schedule(make_schedule("1f1b", 4, 4), file)
    with pytest.raises(Refused, match=r"^parallel.schedule_file = .*: has 4 microbatches, a step has 8"):
        make_plan(job("--parallel.schedule_file", str(file)))
    with pytest.raises(Refused, match=r"^parallel.schedule_file = .*: is for one layout and batch, and pp, tp would"):
        search_layouts(job("--parallel.schedule_file", str(file)), open=frozenset({"pp", "tp"}))


# Stragglers


def equal(tmp_path: Path, *flags: str, p2p: float = 0.0) -> Simulation:
    """Four equal stages: F = I = W = 1 s."""
    rows = [f"{stage},{kind},1" for stage in range(4) for kind in "FIW"]
    rows += [f"{stage},P,{p2p}" for stage in range(3)]
    file = tmp_path / "equal.csv"
    file.write_text("\n".join(["stage,kind,seconds", *rows]))
    return simulate(job(*flags), durations=file)


def test_a_slow_gpu_slows_its_stage_its_pipeline_and_everybody(tmp_path: Path) -> None:
    simulation = equal(tmp_path)
    grid = grid_of(simulation.job)
    rank = grid.rank(Coord(dp=2, pp=3, cp=0, tp=5))
    (one,) = stragglers(simulation, replace(NOTHING, slow_ranks={rank: 1.5}))
    # 1F1B: its last stage works all the time: 8 microbatches of 4.5 s, and once through the three others.
    assert one.pipeline_s == pytest.approx(8 * 4.5 + 3 * 3 - 33)
    assert (one.at, one.lockstep) == (Coord(2, 3, 0, 5), 8)
    assert one.gpu_s == pytest.approx(one.pipeline_s * 128)
    # Its own group waits until its stage is through; so, a little later, do those of the stages before it.
    assert one.group_s[3] == pytest.approx(8 * 4.5 - 8 * 3)
    assert max(one.group_s) == pytest.approx(12)
    assert statistics(simulation, replace(NOTHING, slow_ranks={rank: 1.5})).max_s == pytest.approx(
        simulation.step_s + one.pipeline_s, rel=1e-6
    )


def test_slow_links_are_one_way_and_stragglers_do_not_add_up_across_pipelines(tmp_path: Path) -> None:
    simulation = equal(tmp_path, p2p=0.1)
    order = simulation.timeline.order
    for pair in [(1, 2), (2, 1)]:
        timeline = slowed(simulation, {}, {pair: 10.0})
        assert timeline.step_s > simulation.timeline.step_s
        sent = [a for a, r in zip(order.actions, order.ranks, strict=True) if r == pair[0]]
        assert {a.kind for a in sent} == {Kind.FORWARD, Kind.BACKWARD}
    grid = grid_of(simulation.job)
    slow = {grid.rank(Coord(dp, 3, 0, 0)): 1.5 for dp in (0, 1)}
    alone = {next(iter(slow)): 1.5}
    both, single = (statistics(simulation, replace(NOTHING, slow_ranks=ranks)) for ranks in (slow, alone))
    assert both.max_s == pytest.approx(single.max_s)
    same = {grid.rank(Coord(0, 3, 0, tp)): 1.5 for tp in (0, 1)}
    assert statistics(simulation, replace(NOTHING, slow_ranks=same)).max_s == pytest.approx(single.max_s)
    linked = replace(NOTHING, slow_links={(1, 2): 10.0})
    assert statistics(simulation, linked).max_s == pytest.approx(
        simulation.beyond_s + slowed(simulation, {}, {(1, 2): 10.0}).step_s, rel=1e-6
    )


@pytest.mark.parametrize(
    ("setup", "lockstep", "pipelines"),
    [
        (Setup(tp=8, pp=4, dp=16), 8, 16),
        (Setup(tp=4, cp=2, pp=4, dp=8), 8, 8),
        (Setup(tp=2, cp=2, pp=4, dp=8, ep=8), 16, 2),
        (Setup(tp=2, pp=4, dp=8, zero=3, gather_per_use=True, reduce_per_microbatch=True), 16, 1),
        (Setup(tp=2, pp=4, dp=8, dp_replicate=2, zero=2, reduce_per_microbatch=True), 8, 2),
    ],
)
def test_what_moves_in_lockstep(setup: Setup, lockstep: int, pipelines: int) -> None:
    replicas = Replicas(setup)
    assert (replicas.lockstep, replicas.pipelines) == (lockstep, pipelines)
    coords = [Coord(dp, 0, cp, tp) for dp in range(setup.dp) for cp in range(setup.cp) for tp in range(setup.tp)]
    members = [replicas.pipeline_of(at) for at in coords]
    assert [members.count(pipeline) for pipeline in range(pipelines)] == [lockstep] * pipelines


def test_after_a_failure_each_rank_waits_for_what_never_comes(tmp_path: Path) -> None:
    """1F1B over four equal stages; rank 2 stops at 3.5 s, in its second forward (3–4 s)."""
    stopped = after_stops(equal(tmp_path), {2: 3.5})
    assert [str(one.waits_at) for one in stopped] == ["B0.0", "B1.0", "F2.1", "F3.1"]
    assert [str(one.last) for one in stopped] == ["F0.3", "F1.2", "F2.0", "B3.0"]
    assert [one.since_s for one in stopped] == [4, 4, 3, 6]
    unharmed = after_stops(equal(tmp_path), {2: 1000.0})
    assert [one.waits_at for one in unharmed] == [None] * 4
    at_once = after_stops(equal(tmp_path), {0: 0.0})
    assert [(one.last, str(one.waits_at)) for one in at_once] == [(None, f"F{rank}.0") for rank in range(4)]


def test_several_stops_are_told_by_pipeline_and_the_first_of_a_stage_counts(tmp_path: Path) -> None:
    simulation = equal(tmp_path)
    grid = grid_of(simulation.job)
    ranks = [grid.rank(Coord(*at)) for at in ((0, 2, 0, 0), (0, 2, 0, 5), (0, 0, 0, 1), (3, 1, 0, 0))]
    found = failures(simulation, replace(NOTHING, stops=dict(zip(ranks, (9.0, 3.5, 2.5, 0.0), strict=True))))
    assert [(one.pipeline, [rank for rank, _ in one.stops]) for one in found] == [(0, ranks[:3]), (3, ranks[3:])]
    # As with rank 2 alone, but that nobody gets a third forward.
    assert [str(one.waits_at) for one in found[0].ranks] == ["F0.2", "F1.2", "F2.1", "F3.1"]
    assert [str(one.last) for one in found[0].ranks] == ["F0.1", "F1.1", "F2.0", "B3.0"]
    assert [one.last for one in found[1].ranks][1:] == [None] * 3


# Jitter


def test_jitter_is_that_of_the_slowest_of_all(tmp_path: Path) -> None:
    """One stage, so that a step is the slowest of world · 8 s: the mean of the largest of n normals, by quadrature."""
    asked = load_job(JOB, ["--pp", "1", "--tp", "8", "--dp", "64", "--global-batch", "64"], env={})
    file = tmp_path / "one.csv"
    file.write_text("stage,kind,seconds\n0,F,1\n0,B,2\n")
    simulation = simulate(asked, durations=file)
    sigma, n, repetitions = 0.01, 512, 4000
    found = statistics(simulation, replace(NOTHING, jitter=sigma, seed=3, repetitions=repetitions))
    assert (found.played, found.drawn) == (64 * repetitions, False)
    normal = NormalDist()
    quantiles = [normal.inv_cdf(((k + 0.5) / 10_000) ** (1 / n)) for k in range(10_000)]
    expected = fmean(quantiles)
    measured = log((found.mean_s - simulation.beyond_s) / simulation.timeline.step_s) / sigma
    assert measured == pytest.approx(expected, abs=0.03)
    median = log((found.p50_s - simulation.beyond_s) / simulation.timeline.step_s) / sigma
    assert 0.5 * (1 + erf(median / sqrt(2))) ** 1 == pytest.approx(0.5 ** (1 / n), abs=2e-4)


def test_equal_seeds_give_equal_steps_and_no_jitter_none(tmp_path: Path) -> None:
    simulation = equal(tmp_path)
    faults = replace(NOTHING, jitter=0.02, seed=1, repetitions=50)
    assert statistics(simulation, faults) == statistics(simulation, faults)
    assert statistics(simulation, faults) != statistics(simulation, replace(faults, seed=2))
    assert statistics(simulation, NOTHING).max_s == pytest.approx(simulation.step_s, rel=1e-6)
    found = statistics(simulation, faults)
    assert simulation.step_s < found.p50_s <= found.p95_s <= found.max_s
    assert found.mean_s <= found.max_s


def test_too_many_pipelines_are_drawn_from_as_many_as_can_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways to the same distribution: medians agree within what so many repetitions can tell."""
    simulation = equal(tmp_path, "--dp", "32", "--global-batch", "256")
    faults = replace(NOTHING, jitter=0.02, repetitions=400)
    whole = statistics(simulation, faults)
    monkeypatch.setattr("trigrid.plan.stragglers.MOST_PLAYED", 4000 * len(simulation.timeline.order.ranks))
    drawn = statistics(simulation, faults)
    assert (whole.drawn, whole.played) == (False, 32 * 400)
    assert (drawn.drawn, drawn.played) == (True, 4000)
    assert drawn.p50_s / simulation.step_s == pytest.approx(whole.p50_s / simulation.step_s, abs=0.003)
    assert drawn.mean_s / simulation.step_s == pytest.approx(whole.mean_s / simulation.step_s, abs=0.003)


def test_memory_over_time_ends_where_it_began_and_peaks_as_counted(tmp_path: Path) -> None:
    """P10."""
    simulation = equal(tmp_path)
    stages, schedule = simulation.stages, simulation.schedule
    peaks = peak_bytes(schedule, stages.forward_bytes, stages.weight_bytes)
    for rank, steps in enumerate(simulation.memory):
        assert steps[-1][1] == 0
        assert max(size for _, size in steps) == peaks[rank]
    assert [one.until_input for one in in_flight(schedule)] == [4, 3, 2, 1]
    assert Action(Kind.FORWARD, 0, 0) in schedule.ranks[0]
