"""What ranks hold: by hand, and the peak as the maximum over time."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.schedule import (
    NAMES,
    Action,
    Durations,
    Kind,
    Schedule,
    bytes_over_time,
    in_flight,
    make_schedule,
    messages_alive,
    order_of,
    peak_bytes,
    rank_peak_bytes,
    replay,
)

F, B, INPUT, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT


def of_one_rank(*actions: Action) -> Schedule:
    return Schedule("own", 2, (0,), (actions,))


def test_whole_backwards_free_what_their_forwards_took() -> None:
    schedule = of_one_rank(Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1))
    assert in_flight(schedule) == ((2, 2),)
    assert peak_bytes(schedule, [10], [99]) == (20,)
    timeline = replay(order_of(schedule), Durations.equal(1, 1, 1, 1))
    assert bytes_over_time(timeline, [10], [99]) == (((0, 10), (1, 20), (4, 10), (6, 0)),)


def test_what_an_input_backward_keeps_is_freed_with_the_weights() -> None:
    """Both microbatches wait for their weights: 2 · 4 bytes are more than 7 + … at no time but before."""
    schedule = of_one_rank(
        Action(F, 0, 0), Action(INPUT, 0, 0), Action(F, 0, 1), Action(INPUT, 0, 1), Action(W, 0, 0), Action(W, 0, 1)
    )
    assert in_flight(schedule) == ((1, 2),)
    assert peak_bytes(schedule, [7], [4]) == (11,)
    assert peak_bytes(schedule, [7], [9]) == (18,)
    timeline = replay(order_of(schedule), Durations.equal(1, 1, 2, 4))
    assert bytes_over_time(timeline, [7], [4]) == (((0, 7), (3, 4), (3, 11), (6, 8), (10, 4), (14, 0)),)


def test_messages_are_posted_ahead_and_their_sends_wait() -> None:
    """1F1B, two ranks, F0 F1 B0 B1 and F0 B0 F1 B1: of the only channel to each rank one receive is posted until all
    have been taken; a send is over when the next one is."""
    assert messages_alive(make_schedule("1f1b", 2, 2)) == ((1, 2, 2, 1), (1, 1, 1, 1))


def test_messages_behind_which_one_is_needed_are_taken_early() -> None:
    """Rank 0 of a zbv of two sends F0.0, F0.1, F0.2, I3.0: rank 1 takes F0.2 to get at I3.0, from which I2.0 starts.
    What one stage of a rank hands to the other waits where another action comes between."""
    schedule = make_schedule("zbv", 2, 4)
    alive = dict(zip(map(str, schedule.ranks[1]), messages_alive(schedule)[1], strict=True))
    # A receive and a send; then F0.2; then what I2.0 hands to I1.0; then F0.2 is used.
    assert [alive[name] for name in ("F1.1", "I2.0", "W2.0", "F1.2")] == [2, 3, 4, 3]
    swapped = Schedule("own", 2, (0, 0), (_both(Action(F, 0, 0), Action(F, 0, 1), Action(F, 1, 0), Action(F, 1, 1)),))
    assert messages_alive(swapped)[0][:4] == (0, 1, 1, 0)


def _both(*forwards: Action) -> tuple[Action, ...]:
    return (*forwards, *(action._replace(kind=B) for action in reversed(forwards)))


def test_stages_of_one_rank_are_added_up() -> None:
    schedule = make_schedule("interleaved", 2, 2, 2)
    assert peak_bytes(schedule, [1, 10, 100, 1000], [0] * 4) == (202, 1020)


@given(
    st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.randoms(use_true_random=False)
)
@settings(max_examples=60, deadline=None)
def test_the_peak_is_the_maximum_over_time_whatever_the_durations(
    name: str, pp: int, microbatches: int, v: int, random: Random
) -> None:
    schedule = make_schedule(name, pp, microbatches, v if name == "interleaved" else None)
    held, left = ([random.randint(0, 50) for _ in range(schedule.stages)] for _ in range(2))
    times = Durations.equal(schedule.stages, random.random(), random.random(), random.random(), random.random())
    over_time = bytes_over_time(replay(order_of(schedule), times), held, left)
    assert tuple(max(now for _, now in changes) for changes in over_time) == peak_bytes(schedule, held, left)
    for changes, flight in zip(over_time, in_flight(schedule), strict=True):
        assert [when for when, _ in changes] == sorted(when for when, _ in changes)
        assert changes[-1][1] == 0
        assert 1 <= flight.until_input <= flight.until_weight


@given(
    st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 60), st.integers(1, 3), st.randoms(use_true_random=False)
)
@settings(max_examples=150, deadline=None)
def test_one_rank_is_counted_without_the_others_and_without_the_rounds_that_repeat(
    name: str, pp: int, microbatches: int, v: int, random: Random
) -> None:
    schedule = make_schedule(name, pp, microbatches, v if name == "interleaved" else None)
    held, left = ([random.randint(0, 50) for _ in range(schedule.stages)] for _ in range(2))
    for rank, peak in enumerate(peak_bytes(schedule, held, left)):
        mine = [stage for stage, holder in enumerate(schedule.placement) if holder == rank]
        own, later = [held[stage] for stage in mine], [left[stage] for stage in mine]
        assert rank_peak_bytes(name, pp, microbatches, rank, own, later) == peak
