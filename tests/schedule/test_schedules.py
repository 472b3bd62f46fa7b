"""The named schedules: complete, in order, as little in flight as promised, and as fast as the formula says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.schedule import (
    NAMES,
    Action,
    Durations,
    Kind,
    Schedule,
    channels,
    forward_only,
    in_flight,
    make_schedule,
    order_of,
    receives,
    replay,
    result,
    sends_to,
    validate,
)

ONE_STAGE = ("gpipe", "1f1b", "zb-h1")
V_SHAPED = ("zbv", "dualpipev")
SIZES = list(product(range(1, 9), (1, 2, 3, 4, 7, 8, 12, 17)))


def text(schedule: Schedule, rank: int) -> str:
    """The actions of `rank` as "F0.0 F0.1 B0.0 …"; by microbatch alone where it has one stage."""
    words = map(str, schedule.ranks[rank])
    if schedule.placement.count(rank) > 1:
        return " ".join(words)
    return " ".join(f"{action.kind}{action.microbatch}" for action in schedule.ranks[rank])


def every_schedule(names: tuple[str, ...] = NAMES) -> Iterator[Schedule]:
    for pp, microbatches in SIZES:
        for name in names:
            yield make_schedule(name, pp, microbatches, 3 if name == "interleaved" else None)


def every_forward_only() -> Iterator[Schedule]:
    for pp, microbatches in SIZES:
        for placement in (None, (*range(pp),) * 3, (*range(pp), *reversed(range(pp)))):
            yield forward_only(pp, microbatches, placement)


def played(name: str, pp: int, microbatches: int, v: int, forward: int, grad: int, weight: int) -> tuple[int, int]:
    """Step and idle time of rank 0, with equal stages and free messages."""
    schedule = make_schedule(name, pp, microbatches, v)
    timeline = replay(order_of(schedule), Durations.equal(schedule.stages, forward, grad, weight))
    return int(timeline.step_s), int(timeline.idle_s[0])


def test_every_action_once_and_microbatches_in_order_of_each_stage() -> None:
    """R46: also with fewer microbatches than stages. R28, R30: each stage on one rank, none lost."""
    for schedule in [*every_schedule(), *every_forward_only()]:
        wanted, found = list(range(schedule.microbatches)), 0
        for stage, rank in enumerate(schedule.placement):
            mine = [action for action in schedule.ranks[rank] if action.stage == stage]
            forwards = [action.microbatch for action in mine if action.kind is Kind.FORWARD]
            backwards = [action.microbatch for action in mine if action.kind in (Kind.BACKWARD, Kind.INPUT)]
            halves = [action.microbatch for action in mine if action.kind is Kind.INPUT]
            assert forwards == wanted
            assert backwards == ([] if schedule.name == "forward" else wanted)
            assert [action.microbatch for action in mine if action.kind is Kind.WEIGHT] == halves
            assert len(mine) == len(forwards) + len(backwards) + len(halves)
            found += len(mine)
        assert sum(map(len, schedule.ranks)) == found


def test_placements_run_around_the_ranks_or_to_the_last_and_back() -> None:
    """R28: 16 ranks of 2 stages are 32 stages. R52: interleaving over 2 ranks."""
    assert make_schedule("interleaved", 16, 32, 2).placement == (*range(16), *range(16))
    assert make_schedule("interleaved", 2, 4, 2).placement == (0, 1, 0, 1)
    for name in V_SHAPED:
        assert make_schedule(name, 3, 6).placement == (0, 1, 2, 2, 1, 0)
    for name in ONE_STAGE:
        assert make_schedule(name, 3, 6).placement == (0, 1, 2)


@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_every_named_schedule_is_valid(name: str, pp: int, microbatches: int, v: int) -> None:
    """R49, R50, R52: none waits in a circle, whatever the size; nor do forwards alone over its stages."""
    schedule = make_schedule(name, pp, microbatches, v if name == "interleaved" else None)
    assert (schedule.name, schedule.microbatches, len(schedule.ranks)) == (name, microbatches, pp)
    validate(schedule)
    validate(forward_only(pp, microbatches, schedule.placement), (Kind.FORWARD,))


def test_large_schedules_are_valid() -> None:
    """R49: as long and as deep as those of real runs."""
    for name in NAMES:
        validate(make_schedule(name, 16, 48, 4 if name == "interleaved" else None))


def test_one_stage_per_rank_interleaved_is_one_forward_one_backward() -> None:
    for pp, microbatches in SIZES:
        assert make_schedule("interleaved", pp, microbatches).ranks == make_schedule("1f1b", pp, microbatches).ranks


# Written out


def test_one_forward_one_backward_written_out() -> None:
    """The last stage alternates from the start: F1 F2 B1 B2, which is sometimes drawn, is not 1F1B."""
    schedule = make_schedule("1f1b", 4, 5)
    assert text(schedule, 0) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert text(schedule, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert text(schedule, 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert text(schedule, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_gpipe_written_out() -> None:
    schedule = make_schedule("gpipe", 2, 3)
    assert text(schedule, 0) == text(schedule, 1) == "F0 F1 F2 B0 B1 B2"


def test_interleaved_written_out() -> None:
    """R52: two ranks of two stages; with a microbatch less, its actions alone are missing."""
    first = "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    last = "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    for microbatches in (4, 3):
        schedule = make_schedule("interleaved", 2, microbatches, 2)
        for rank, line in enumerate((first, last)):
            assert text(schedule, rank) == " ".join(w for w in line.split() if int(w[-1]) < microbatches)


def test_zb_h1_written_out() -> None:
    """The weights lag one microbatch more behind on each later rank (Qi 2023, figure 3)."""
    schedule = make_schedule("zb-h1", 3, 4)
    assert text(schedule, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert text(schedule, 1) == "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
    assert text(schedule, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_v_shapes_written_out() -> None:
    schedule = make_schedule("zbv", 2, 4)
    assert text(schedule, 0) == (
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 F3.3 I3.3 W3.3 "
        "I0.2 W0.2 I0.3 W0.3"
    )
    schedule = make_schedule("dualpipev", 2, 4)
    assert text(schedule, 1) == (
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2 B1.0 F1.3 B2.1 F2.3 B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3"
    )


# What they promise


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_p_minus_1_over_m(name: str) -> None:
    """With equal stages, a step takes m + p − 1 times a forward and a backward (Narayanan 2021, section 2.2)."""
    for pp, microbatches in SIZES:
        schedule = make_schedule(name, pp, microbatches)
        timeline = replay(order_of(schedule), Durations.equal(pp, 3, 4, 1))
        assert timeline.step_s == (microbatches + pp - 1) * (3 + 5)
        assert timeline.bubble_ratio == (pp - 1) / microbatches
        assert set(timeline.bubble_ratios) == {timeline.bubble_ratio}
        assert timeline.idle_share == (pp - 1) / (microbatches + pp - 1)


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank() -> None:
    """Narayanan 2021, section 2.2.2: (p − 1)/(v·m), m a multiple of p."""
    for pp, groups, v in product(range(1, 9), (1, 2, 3), (1, 2, 3, 4)):
        schedule = make_schedule("interleaved", pp, groups * pp, v)
        timeline = replay(order_of(schedule), Durations.equal(pp * v, 3, 4, 1))
        assert timeline.bubble_ratio == (pp - 1) / (v * groups * pp)


def test_interleaving_with_a_shortage_is_as_fast_as_dependencies_allow() -> None:
    """Up to p microbatches: the first goes there and back, the others follow; beyond, no worse than 1F1B."""
    for pp, v in product(range(1, 9), (2, 3)):
        for microbatches in range(1, pp + 1):
            assert played("interleaved", pp, microbatches, v, 1, 1, 1)[0] == 3 * (pp * v + microbatches - 1)
        for microbatches in range(pp + 1, 3 * pp):
            assert played("interleaved", pp, microbatches, v, 1, 1, 1)[0] <= 3 * v * (microbatches + pp - 1)


def test_zb_h1_idles_p_minus_1_forwards_and_backwards_without_weights() -> None:
    """Qi 2023, table 2: (p − 1)(F + I − W) on every rank while W is the shortest; with p in flight no less is possible
    than rank 0's wait for its first gradient and the last rank's for its first microbatch."""
    for pp, surplus, f, i, w in product(range(1, 9), (0, 1, 7), (1, 2, 4), (1, 2, 4), (1, 3)):
        schedule = make_schedule("zb-h1", pp, pp + surplus)
        timeline = replay(order_of(schedule), Durations.equal(pp, f, i, w))
        assert set(timeline.idle_s) == {(pp - 1) * max(f + i - w, f, i)}


def test_zbv_has_no_bubble_between_a_ranks_first_action_and_its_last() -> None:
    """Qi 2024, table 1, V-ZB, with F = I = W: all that is left is the way of the first microbatch to the last rank."""
    for pp, surplus in product(range(1, 9), (0, 1, 5)):
        m = 2 * pp + surplus
        timeline = replay(order_of(make_schedule("zbv", pp, m)), Durations.equal(2 * pp, 1, 1, 1))
        assert timeline.step_s == 6 * m + pp - 1
        for rank in range(pp):
            mine = [span for span in timeline.spans if span.rank == rank]
            assert mine[-1].end_s - mine[0].start_s == timeline.busy_s[rank] == 6 * m
            assert mine[0].start_s == rank


@pytest.mark.parametrize(("forward", "grad", "weight"), [(1, 1, 1), (2, 2, 1), (3, 3, 2)])
def test_dualpipev_idles_as_published(forward: int, grad: int, weight: int) -> None:
    """The DualPipe repository's table: (PP/2 − 1)(F&B + B − 3W) over PP = 2p stages, where F&B is one piece of work.

    Here F&B takes as long as both, so both results are late: as single actions the step is never longer.
    """
    took = {Kind.FORWARD: forward, Kind.BACKWARD: grad + weight, Kind.INPUT: grad, Kind.WEIGHT: weight}
    for pp, surplus in product(range(2, 8), (0, 1, 5)):
        schedule = make_schedule("dualpipev", pp, 2 * pp + surplus)
        busy = 2 * schedule.microbatches * (forward + grad + weight)
        published = (pp - 1) * (forward + 2 * (grad + weight) - 3 * weight)
        assert paired_makespan(schedule, took) == busy + published
        assert played("dualpipev", pp, schedule.microbatches, 2, forward, grad, weight)[1] <= published
        if forward == grad == weight:
            assert played("dualpipev", pp, schedule.microbatches, 2, 1, 1, 1)[1] == pp - 1


def paired_makespan(schedule: Schedule, took: dict[Kind, int]) -> int:
    """Time of dualpipev where, once backwards begin, a forward and the whole backward behind it start and end as one.

    On the last rank the first such pair is apart, as in the repository: it is one microbatch that turns around.
    """
    pieces: list[list[tuple[Action, ...]]] = []
    for rank, line in enumerate(schedule.ranks):
        found: list[tuple[Action, ...]] = [line[:1]]
        apart = rank == len(schedule.ranks) - 1
        for before, action in pairwise(line):
            if before.kind is Kind.FORWARD and action.kind is Kind.BACKWARD and not apart:
                found[-1] += (action,)
            else:
                apart = apart and action.kind is not Kind.BACKWARD
                found.append((action,))
        pieces.append(found)
    end: dict[Action, int] = {}
    clock, at = [0] * len(pieces), [0] * len(pieces)
    while any(at[rank] < len(found) for rank, found in enumerate(pieces)):
        for rank, found in enumerate(pieces):
            while at[rank] < len(found):
                needed = [need for action in found[at[rank]] if (need := receives(schedule, action))]
                if any(need not in end for need in needed):
                    break
                clock[rank] = max([clock[rank], *(end[need] for need in needed)])
                clock[rank] += sum(took[action.kind] for action in found[at[rank]])
                end |= {result(action): clock[rank] for action in found[at[rank]] if action.kind is not Kind.WEIGHT}
                at[rank] += 1
    return max(clock)


@pytest.mark.parametrize("pp", range(1, 9))
def test_microbatches_in_flight(pp: int) -> None:
    """1F1B: stage i keeps min(m, p − i) microbatches, GPipe all of them, zb-h1 at most p until their weights are done;
    zbv 2p chunks, 1F1B's peak, and dualpipev one more."""
    for m, rank in product((1, 2, 3, 4, 7, 8, 12, 17), range(pp)):
        assert in_flight(make_schedule("1f1b", pp, m))[rank] == (min(m, pp - rank),) * 2
        assert in_flight(make_schedule("gpipe", pp, m))[rank] == (m, m)
        assert in_flight(make_schedule("zb-h1", pp, m))[rank] == (min(m, pp - rank), min(m, pp))
        assert in_flight(make_schedule("zbv", pp, m))[rank].until_weight <= 2 * min(m, pp)
        assert in_flight(make_schedule("dualpipev", pp, m))[rank].until_weight <= min(2 * m, 2 * pp + 1)
        if m >= 2 * pp:
            assert in_flight(make_schedule("zbv", pp, m))[rank] == (2 * pp,) * 2
            assert in_flight(make_schedule("dualpipev", pp, m))[rank] == (2 * pp + 1,) * 2


def test_chunks_in_flight_when_interleaved() -> None:
    """modelling.md, memory 4: rank 0 holds p·v + p − 1 chunks where m ≥ p, and never more than the m·v there are."""
    for pp, v, m in product(range(1, 9), (2, 3, 4), range(1, 25)):
        held = in_flight(make_schedule("interleaved", pp, m, v))
        most = min(pp * v + pp - 1, m * v)
        if m % pp == 0 or m < pp or m > 2 * pp:
            assert held[0].until_weight == most
        assert max(held).until_weight <= most


def test_a_forward_pass_takes_a_forward_per_microbatch_and_stage_before_the_last() -> None:
    for pp, microbatches in SIZES:
        timeline = replay(order_of(forward_only(pp, microbatches)), Durations.equal(pp, 2, 1, 1))
        assert timeline.step_s == 2 * (microbatches + pp - 1)


def test_a_forward_pass_over_several_stages_per_rank_keeps_the_ranks_busy() -> None:
    for schedule in every_forward_only():
        pp, v = len(schedule.ranks), schedule.stages // len(schedule.ranks)
        timeline = replay(order_of(schedule), Durations.equal(schedule.stages, 2, 1, 1))
        assert timeline.step_s <= 2 * v * (schedule.microbatches + pp)


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(KeyError, match="1b1f"):
        make_schedule("1b1f", 2, 2)
    with pytest.raises(ValueError, match="schedule zbv: 2 stages per rank, not 3"):
        make_schedule("zbv", 2, 4, 3)
    with pytest.raises(ValueError, match="schedule 1f1b: 1 stages per rank, not 2"):
        make_schedule("1f1b", 2, 4, 2)
    for sizes in [(0, 4, 1), (2, 0, 1), (2, 4, 0)]:
        with pytest.raises(
            ValueError, match="schedule interleaved: ranks, microbatches and stages per rank are at least"
        ):
            make_schedule("interleaved", *sizes)


# Messages


def test_neighbours_exchange_one_message_per_microbatch_each_way_in_the_order_of_their_use() -> None:
    """R50: a receiver takes messages in the order of its channel, so none waits behind one that comes later."""
    for schedule in [*every_schedule(ONE_STAGE), *(forward_only(*size) for size in SIZES)]:
        routes = channels(schedule)
        last = len(schedule.ranks) - 1
        down = {(rank, rank + 1) for rank in range(last)}
        up = set() if schedule.name == "forward" else {(rank + 1, rank) for rank in range(last)}
        assert routes.keys() == down | up
        for (src, dst), messages in routes.items():
            wanted = [need for action in schedule.ranks[dst] if (need := receives(schedule, action))]
            assert list(messages) == [need for need in wanted if schedule.placement[need.stage] == src]
            assert len(messages) == schedule.microbatches


def test_every_message_of_a_named_schedule_has_one_sender_and_one_receiver() -> None:
    """R50: also where one stage splits the backward whose gradient another needs."""
    for schedule in every_schedule():
        routes = channels(schedule)
        sent = [message for messages in routes.values() for message in messages]
        used = [need for line in schedule.ranks for action in line if (need := receives(schedule, action))]
        assert sorted(sent) == sorted(used)
        assert len(set(sent)) == len(sent)
        for (src, dst), messages in routes.items():
            assert {schedule.placement[message.stage] for message in messages} == {src} != {dst}


def test_what_is_sent_is_received() -> None:
    """Over any placement, interleaved and V-shaped ones too: a message has one sender, and one receiver elsewhere."""
    for placement in [(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0,), (0, 0, 0), (1, 0)]:
        ranks = len(set(placement))
        for kinds in [(Kind.FORWARD, Kind.BACKWARD), (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)]:
            actions = [Action(kind, stage, 0) for kind in kinds for stage in range(len(placement))]
            schedule = Schedule(
                "any", 1, placement, tuple(tuple(a for a in actions if placement[a.stage] == r) for r in range(ranks))
            )
            sent = {
                (result(action), target) for action in actions if (target := sends_to(schedule, action)) is not None
            }
            received = {(need, placement[action.stage]) for action in actions if (need := receives(schedule, action))}
            assert sent == received
            assert all(placement[action.stage] != target for action, target in sent)
            assert sum(map(len, channels(schedule).values())) == len(sent)
            crossings = sum(placement[s] != placement[s + 1] for s in range(len(placement) - 1))
            assert len(sent) == 2 * crossings


def test_an_action_prints_as_kind_stage_and_microbatch() -> None:
    assert str(Action(Kind.BACKWARD, 3, 12)) == "B3.12"
    assert str(Action(Kind.INPUT, 0, 1)) == "I0.1"
