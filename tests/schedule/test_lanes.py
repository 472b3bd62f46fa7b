"""Thousands of plays at once say what each play by itself says; what ranks wait for is told apart."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.schedule import NAMES, Durations, make_schedule, order_of, replay
from trigrid.schedule.lanes import FACTOR_BITS, LANES, fixed, play_lanes
from trigrid.schedule.waits import waits

sizes = {
    "name": st.sampled_from(NAMES),
    "pp": st.integers(1, 5),
    "microbatches": st.integers(1, 9),
    "random": st.randoms(use_true_random=False),
}


def random_times(random: Random, stages: int, p2p: float) -> Durations:
    def times(count: int, most: float) -> tuple[float, ...]:
        return tuple(random.choice((0.0, random.uniform(0, most))) for _ in range(count))

    return Durations(
        forward_s=times(stages, 5),
        backward_s=times(stages, 9),
        input_s=times(stages, 5),
        weight_s=times(stages, 5),
        p2p_s=times(stages - 1, p2p),
    )


@given(**sizes, lanes=st.integers(1, 9), scale=st.sampled_from((1e-6, 1.0, 1e4)))
@settings(max_examples=80, deadline=None)
def test_every_lane_is_a_play(name: str, pp: int, microbatches: int, random: Random, lanes: int, scale: float) -> None:
    """Slow links as well, up to a thousand times, which queue up messages."""
    schedule = make_schedule(name, pp, microbatches)
    order, durations = order_of(schedule), random_times(random, schedule.stages, 4)
    seconds = [scale * took for took in order.seconds(durations)]
    delays = [scale * delay for delay in order.delays(durations)]
    factors = [
        array("Q", [fixed(random.choice((1.0, random.uniform(0.5, 1.5), 1000.0))) for _ in range(lanes)])
        for _ in range(pp)
    ]
    slow = {
        link: array("Q", [fixed(random.uniform(1, 1000)) for _ in range(lanes)])
        for link in range(max(order.links, default=-1) + 1)
        if random.random() < 0.5
    }
    found = play_lanes(order, seconds, delays, factors, slow)
    for lane, end_s in enumerate(found):
        whole = 1 << FACTOR_BITS
        mine = [took * factors[rank][lane] / whole for took, rank in zip(seconds, order.ranks, strict=True)]
        late = [
            delay * (slow[link][lane] / whole if link in slow else 1.0)
            for delay, link in zip(delays, order.links, strict=True)
        ]
        # Each of at most so many times is off by half a tick, multiplied with the factor.
        ticks = order.play(seconds, delays).step_s * 1000 * 2**-38
        slack_s = 2 * len(seconds) * ticks * 1000 + 1e-190
        assert end_s == pytest.approx(order.play(mine, late).step_s, rel=1e-9, abs=slack_s)


def test_times_too_short_for_a_tick_take_none() -> None:
    order = order_of(make_schedule("gpipe", 1, 1))
    assert play_lanes(order, [0.0, 5e-324], [0.0, 0.0], [array("Q", [fixed(1.0)])], {}) == [0.0]


def test_more_lanes_than_one_go_takes() -> None:
    order = order_of(make_schedule("1f1b", 2, 3))
    durations = Durations.equal(2, 1, 1, 1)
    count = 2 * LANES + 5
    ramp = array("Q", [fixed(1 + i / count) for i in range(count)])
    found = play_lanes(order, order.seconds(durations), order.delays(durations), [ramp, ramp], {})
    assert found == pytest.approx([12 * (1 + i / count) for i in range(count)], rel=1e-6)


def test_a_step_without_work_takes_no_time() -> None:
    order = order_of(make_schedule("gpipe", 1, 1))
    assert play_lanes(order, [0.0, 0.0], [0.0, 0.0], [array("Q", [fixed(1.0)] * 3)], {}) == [0.0, 0.0, 0.0]


def test_idle_time_is_that_of_messages_under_way_and_the_rest() -> None:
    """gpipe, one microbatch: F0 0–1, message 1–4, F1 4–5, B1 5–7, message 7–10, B0 10–12."""
    timeline = replay(order_of(make_schedule("gpipe", 2, 1)), Durations.equal(2, 1, 1, 1, p2p_s=3))
    first, last = waits(timeline)
    # Rank 0 waits 1–10: 3 s for the message, 6 s before it left. Rank 1: 1 s, then 3 s, and 5 s at the end.
    assert (first.message_s, first.bubble_s) == (3, 6)
    assert (last.message_s, last.bubble_s) == (3, 6)


@given(**sizes)
@settings(max_examples=60, deadline=None)
def test_waits_sum_to_the_idle_time_and_free_messages_expose_nothing(
    name: str, pp: int, microbatches: int, random: Random
) -> None:
    schedule = make_schedule(name, pp, microbatches)
    for p2p in (0.0, 3.0):
        timeline = replay(order_of(schedule), random_times(random, schedule.stages, p2p))
        for (message_s, bubble_s), idle_s in zip(waits(timeline), timeline.idle_s, strict=True):
            assert message_s + bubble_s == pytest.approx(idle_s, abs=1e-9)
            assert min(message_s, bubble_s) >= -1e-9
            assert p2p or message_s == 0
