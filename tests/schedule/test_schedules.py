"""The named schedules: complete, in order, as little in flight as promised, and as fast as the formula says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from trigrid.schedule import Action, Kind, Schedule, channels, make_schedule, receives, sends_to, validate
from trigrid.schedule.generators import forward_only

NAMES = ("gpipe", "1f1b")
SIZES = list(product(range(1, 9), (1, 2, 3, 4, 7, 8, 12, 17)))


def text(schedule: Schedule, rank: int) -> str:
    """The actions of `rank` as "F0 F1 B0 …", by microbatch."""
    return " ".join(f"{action.kind}{action.microbatch}" for action in schedule.ranks[rank])


def in_flight(schedule: Schedule, rank: int) -> int:
    """The most microbatches whose forward `rank` has done and whose backward it has not."""
    now = most = 0
    for action in schedule.ranks[rank]:
        now += 1 if action.kind is Kind.FORWARD else -1
        most = max(most, now)
    assert now == 0
    return most


def makespan(schedule: Schedule, duration: dict[Kind, int]) -> int:
    """Time to run `schedule` where messages take none and ranks wait for nothing else."""
    end: dict[Action, int] = {}
    clock, at = [0] * len(schedule.ranks), [0] * len(schedule.ranks)
    while any(at[rank] < len(actions) for rank, actions in enumerate(schedule.ranks)):
        before = list(at)
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                need = receives(schedule, action)
                if need is not None and need not in end:
                    break
                clock[rank] = max(clock[rank], end[need] if need else 0) + duration[action.kind]
                end[action] = clock[rank]
                at[rank] += 1
        assert at != before, "stuck"
    return max(clock)


def every_schedule() -> Iterator[Schedule]:
    for pp, microbatches in SIZES:
        yield forward_only(pp, microbatches)
        for name in NAMES:
            yield make_schedule(name, pp, microbatches)


def test_every_action_once_and_microbatches_in_order() -> None:
    """R46: also with fewer microbatches than stages."""
    for schedule in every_schedule():
        kinds = [Kind.FORWARD] if schedule.name == "forward" else [Kind.FORWARD, Kind.BACKWARD]
        for rank, actions in enumerate(schedule.ranks):
            for kind in kinds:
                of_kind = [action for action in actions if action.kind is kind]
                assert of_kind == [Action(kind, rank, m) for m in range(schedule.microbatches)]
            assert len(actions) == len(kinds) * schedule.microbatches
        assert schedule.placement == tuple(range(len(schedule.ranks)))
        assert schedule.stages == len(schedule.ranks)


def test_every_schedule_is_valid() -> None:
    """R49: no named schedule waits in a circle, with 1 to 8 stages."""
    for schedule in every_schedule():
        validate(schedule, tuple({action.kind: None for action in schedule.ranks[0]}))


@pytest.mark.parametrize("pp", range(1, 9))
def test_microbatches_in_flight(pp: int) -> None:
    """1F1B: stage i keeps min(m, p − i) microbatches, GPipe all of them."""
    for microbatches, stage in product((1, 2, 3, 4, 7, 8, 12, 17), range(pp)):
        assert in_flight(make_schedule("1f1b", pp, microbatches), stage) == min(microbatches, pp - stage)
        assert in_flight(make_schedule("gpipe", pp, microbatches), stage) == microbatches


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


@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_is_p_minus_1_over_m(name: str) -> None:
    """With equal stages, a step takes m + p − 1 times a forward and a backward (Narayanan 2021, section 2.2)."""
    for pp, microbatches in SIZES:
        took = makespan(make_schedule(name, pp, microbatches), {Kind.FORWARD: 3, Kind.BACKWARD: 5})
        assert took == (microbatches + pp - 1) * (3 + 5)


def test_a_forward_pass_takes_a_forward_per_microbatch_and_stage_before_the_last() -> None:
    for pp, microbatches in SIZES:
        assert makespan(forward_only(pp, microbatches), {Kind.FORWARD: 2}) == 2 * (microbatches + pp - 1)


def test_an_unknown_name_is_no_schedule() -> None:
    with pytest.raises(KeyError, match="1b1f"):
        make_schedule("1b1f", 2, 2)


# Messages


def test_neighbours_exchange_one_message_per_microbatch_each_way_in_the_order_of_their_use() -> None:
    """R50: a receiver takes messages in the order of its channel, so none waits behind one that comes later."""
    for schedule in every_schedule():
        routes = channels(schedule)
        last = len(schedule.ranks) - 1
        down = {(rank, rank + 1) for rank in range(last)}
        up = set() if schedule.name == "forward" else {(rank + 1, rank) for rank in range(last)}
        assert routes.keys() == down | up
        for (src, dst), messages in routes.items():
            wanted = [need for action in schedule.ranks[dst] if (need := receives(schedule, action))]
            assert list(messages) == [need for need in wanted if schedule.placement[need.stage] == src]
            assert len(messages) == schedule.microbatches


def test_what_is_sent_is_received() -> None:
    """Over any placement, interleaved and V-shaped ones too: a message has one sender, and one receiver elsewhere."""
    for placement in [(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0,), (0, 0, 0), (1, 0)]:
        ranks = len(set(placement))
        actions = [Action(kind, stage, 0) for kind in Kind for stage in range(len(placement))]
        schedule = Schedule(
            "any", 1, placement, tuple(tuple(a for a in actions if placement[a.stage] == r) for r in range(ranks))
        )
        sent = {(action, target) for action in actions if (target := sends_to(schedule, action)) is not None}
        received = {(need, placement[action.stage]) for action in actions if (need := receives(schedule, action))}
        assert sent == received
        assert all(placement[action.stage] != target for action, target in sent)
        assert sum(map(len, channels(schedule).values())) == len(sent)
        crossings = sum(placement[s] != placement[s + 1] for s in range(len(placement) - 1))
        assert len(sent) == 2 * crossings


def test_an_action_prints_as_kind_stage_and_microbatch() -> None:
    assert str(Action(Kind.BACKWARD, 3, 12)) == "B3.12"
