"""Replay: what it computes is what its model says, whatever the schedule and the durations."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.schedule import (
    NAMES,
    Action,
    Durations,
    Kind,
    Schedule,
    Timeline,
    channels,
    make_schedule,
    needs,
    order_of,
    receives,
    replay,
    result,
)

F, B, INPUT, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT


def cost(durations: Durations, action: Action) -> float:
    by_kind = {F: durations.forward_s, B: durations.backward_s, INPUT: durations.input_s, W: durations.weight_s}
    return by_kind[action.kind][action.stage]


def reference(schedule: Schedule, durations: Durations) -> dict[Action, float]:
    """When each action ends: the smallest times that satisfy the model, found by raising them until they do."""
    maker = {result(action): action for line in schedule.ranks for action in line if action.kind is not W}
    queues = channels(schedule).values()
    edge = {m: min(m.stage, m.stage + (1 if m.kind is F else -1)) for queue in queues for m in queue}
    end = {action: cost(durations, action) for line in schedule.ranks for action in line}
    arrives = {result(action): 0.0 for action in maker.values()}
    settled = False
    while not settled:
        before = (dict(end), dict(arrives))
        for line in schedule.ranks:
            for previous, action in pairwise((None, *line)):
                need = needs(schedule, action)
                starts = max(end[previous] if previous else 0, arrives[need] if need else 0)
                end[action] = starts + cost(durations, action)
        for message, action in maker.items():
            arrives[message] = end[action]
        for queue in queues:
            free: float = 0
            for message in queue:
                free = max(free, end[maker[message]]) + durations.p2p_s[edge[message]]
                arrives[message] = free
        settled = before == (end, arrives)
    return end


def random_durations(random: Random, stages: int, p2p: int = 4) -> Durations:
    def times(count: int, most: int) -> tuple[float, ...]:
        return tuple(float(random.randint(0, most)) for _ in range(count))

    return Durations(
        forward_s=times(stages, 5),
        backward_s=times(stages, 9),
        input_s=times(stages, 5),
        weight_s=times(stages, 5),
        p2p_s=times(stages - 1, p2p),
    )


sizes = {
    "name": st.sampled_from(NAMES),
    "pp": st.integers(1, 5),
    "microbatches": st.integers(1, 9),
    "v": st.integers(1, 3),
    "random": st.randoms(use_true_random=False),
}


def schedule_of(name: str, pp: int, microbatches: int, v: int) -> Schedule:
    return make_schedule(name, pp, microbatches, v if name == "interleaved" else None)


@given(**sizes)
@settings(max_examples=80, deadline=None)
def test_the_replay_is_that_of_a_slow_reference(name: str, pp: int, microbatches: int, v: int, random: Random) -> None:
    """Whole numbers, so that both are exact."""
    schedule = schedule_of(name, pp, microbatches, v)
    durations = random_durations(random, schedule.stages)
    timeline = replay(order_of(schedule), durations)
    ends = {span.action: span.end_s for span in timeline.spans}
    assert ends == reference(schedule, durations)
    assert timeline.step_s == max(ends.values())
    for rank, line in enumerate(schedule.ranks):
        assert timeline.busy_s[rank] == sum(cost(durations, action) for action in line)


@given(**sizes)
@settings(max_examples=60, deadline=None)
def test_ranks_do_one_thing_at_a_time_in_their_order_and_nothing_before_what_it_needs(
    name: str, pp: int, microbatches: int, v: int, random: Random
) -> None:
    schedule = schedule_of(name, pp, microbatches, v)
    durations = random_durations(random, schedule.stages)
    timeline = replay(order_of(schedule), durations)
    end: dict[Action, float] = {}
    lines: defaultdict[int, list[Action]] = defaultdict(list)
    free: defaultdict[int, float] = defaultdict(float)
    for rank, action, start_s, end_s in timeline.spans:
        assert start_s >= free[rank]
        assert end_s - start_s == cost(durations, action)
        need = needs(schedule, action)
        if need is not None:
            crosses = durations.p2p_s[min(need.stage, action.stage)] if receives(schedule, action) else 0
            assert start_s >= end[need] + crosses
        if action.kind in (B, INPUT):
            assert start_s >= end[action._replace(kind=F)]
        if action.kind is W:
            assert start_s >= end[action._replace(kind=INPUT)]
        end[action] = free[rank] = end_s
        if action.kind is INPUT:
            end[result(action)] = end_s
        lines[rank].append(action)
    assert tuple(tuple(lines[rank]) for rank in range(pp)) == schedule.ranks


def critical_path(schedule: Schedule, durations: Durations) -> float:
    """The longest chain of one microbatch: all forwards and back, the weights of the first stage last."""
    split = {action[1:] for line in schedule.ranks for action in line if action.kind is INPUT}
    crossings = sum(
        delay for s, delay in enumerate(durations.p2p_s) if schedule.placement[s] != schedule.placement[s + 1]
    )
    return max(
        sum(durations.forward_s)
        + sum((durations.input_s if (s, m) in split else durations.backward_s)[s] for s in range(schedule.stages))
        + (durations.weight_s[0] if (0, m) in split else 0)
        + 2 * crossings
        for m in range(schedule.microbatches)
    )


@given(**sizes)
@settings(max_examples=60, deadline=None)
def test_a_step_is_no_shorter_than_its_longest_chain_and_its_busiest_rank(
    name: str, pp: int, microbatches: int, v: int, random: Random
) -> None:
    schedule = schedule_of(name, pp, microbatches, v)
    durations = random_durations(random, schedule.stages)
    timeline = replay(order_of(schedule), durations)
    assert timeline.step_s >= max(*timeline.busy_s, critical_path(schedule, durations))


@given(**sizes, slower=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_no_time_grows_and_makes_the_step_shorter(
    name: str, pp: int, microbatches: int, v: int, random: Random, slower: int
) -> None:
    """More P2P never makes 1F1B faster, nor does a slower stage any other schedule."""
    schedule = schedule_of(name, pp, microbatches, v)
    order = order_of(schedule)
    durations = random_durations(random, schedule.stages)
    step_s = replay(order, durations).step_s
    edges = tuple(delay + random.choice((0, slower)) for delay in durations.p2p_s)
    assert replay(order, replace(durations, p2p_s=edges)).step_s >= step_s
    stages = tuple(took + random.choice((0, slower)) for took in durations.forward_s)
    assert replay(order, replace(durations, forward_s=stages)).step_s >= step_s


def spans(timeline: Timeline, rank: int) -> str:
    mine = [span for span in timeline.spans if span.rank == rank]
    return " ".join(f"{span.action}@{span.start_s:g}-{span.end_s:g}" for span in mine)


def test_messages_take_their_time_and_pass_one_by_one() -> None:
    """Forwards of 1 s, messages of 3 s: the second leaves the channel 3 s after the first, ranks work on meanwhile."""
    schedule = make_schedule("gpipe", 2, 2)
    timeline = replay(order_of(schedule), Durations.equal(2, 1, 1, 1, p2p_s=3))
    assert spans(timeline, 0) == "F0.0@0-1 F0.1@1-2 B0.0@13-15 B0.1@16-18"
    assert spans(timeline, 1) == "F1.0@4-5 F1.1@7-8 B1.0@8-10 B1.1@10-12"
    assert (timeline.step_s, timeline.busy_s, timeline.idle_s) == (18, (6, 6), (12, 12))
    assert (timeline.bubble_ratio, timeline.idle_share) == (2, 2 / 3)
    assert timeline.bubble_ratios == (2, 2)
    assert timeline.idle_shares == (2 / 3, 2 / 3)


def test_each_boundary_has_its_own_time_and_one_inside_a_rank_none() -> None:
    """R52 and V shapes: stages 1 and 2 of a V over two ranks share a rank."""
    zero = Durations.equal(4, 0, 0, 0)
    for name, edges, crossings in [("zbv", (1, 10, 100), 101), ("interleaved", (1, 10, 100), 111)]:
        schedule = make_schedule(name, 2, 1, 2)
        assert replay(order_of(schedule), replace(zero, p2p_s=edges)).step_s == 2 * crossings
    alone = make_schedule("interleaved", 1, 3, 2)
    assert replay(order_of(alone), Durations.equal(2, 1, 1, 1, p2p_s=50)).step_s == 3 * 6


def test_a_rank_ratio_differs_from_that_of_all_where_stages_are_unequal() -> None:
    schedule = make_schedule("gpipe", 2, 1)
    times = replace(Durations.equal(2, 1, 1, 1), forward_s=(1.0, 5.0), backward_s=(2.0, 2.0))
    timeline = replay(order_of(schedule), times)
    assert (timeline.step_s, timeline.busy_s) == (10, (3, 7))
    assert timeline.bubble_ratios == (7 / 3, 3 / 7)
    assert (timeline.bubble_ratio, timeline.idle_share) == (1, 0.5)
    assert timeline.idle_shares == (0.7, 0.3)


def test_ratios_of_a_step_without_work() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    nothing = replay(order_of(schedule), Durations.equal(2, 0, 0, 0))
    assert (nothing.bubble_ratio, nothing.idle_share) == (0, 0)
    waiting = replay(order_of(schedule), Durations.equal(2, 0, 0, 0, p2p_s=1))
    assert (waiting.bubble_ratio, waiting.idle_share) == (float("inf"), 1)


def test_a_pipeline_of_four_idles_less_than_8_percent_from_35_microbatches_on() -> None:
    """mission.md: PP4, 1F1B: (p − 1)/(m + p − 1) = 3/38."""
    timeline = replay(order_of(make_schedule("1f1b", 4, 35)), Durations.equal(4, 1, 1, 1))
    assert timeline.idle_share == pytest.approx(3 / 38, rel=1e-12)
    assert timeline.bubble_ratio == pytest.approx(3 / 35, rel=1e-12)


def test_one_order_is_played_with_many_durations_and_with_times_of_single_actions() -> None:
    order = order_of(make_schedule("1f1b", 2, 3))
    durations = Durations.equal(2, 1, 1, 1)
    first, slow = replay(order, durations), replay(order, Durations.equal(2, 2, 2, 2))
    assert slow.step_s == 2 * first.step_s == 24
    assert replay(order, durations) == first
    seconds = order.seconds(durations)
    seconds[order.actions.index(Action(F, 1, 0))] += 5
    assert order.play(seconds, order.delays(durations)).step_s == first.step_s + 5


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    """R49: stage 1 wants microbatch 1 first, which stage 0 forwards only after the backward of microbatch 0."""
    ranks = (
        (Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)),
        (Action(F, 1, 1), Action(B, 1, 1), Action(F, 1, 0), Action(B, 1, 0)),
    )
    with pytest.raises(ValueError, match=r"schedule own: a circle of waits, rank 0 at B0\.0; rank 1 at F1\.1"):
        order_of(Schedule("own", 2, (0, 1), ranks))


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("forward_s", (1.0, -1.0), r"forward_s: a negative or endless time in \(1.0, -1.0\)"),
        ("p2p_s", (float("nan"),), "p2p_s: a negative or endless time"),
        ("weight_s", (1.0,), "weight_s: 1 times, not 2"),
        ("p2p_s", (0.0, 0.0), "p2p_s: 2 times, not 1"),
    ],
)
def test_impossible_durations_are_refused(field: str, values: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Durations.equal(2, 1, 1, 1), **{field: values})
