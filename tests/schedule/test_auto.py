"""Schedules made for given times: valid, within their limits, never slower than a named one, and near the bound."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.schedule import Action, Durations, Kind, Schedule, make_schedule, order_of, peak_bytes, replay, validate
from trigrid.schedule.auto import Auto, auto_schedule
from trigrid.schedule.limits import Limits, lower_bound

F, B = Kind.FORWARD, Kind.BACKWARD


def durations(
    forward: tuple[float, ...], into: tuple[float, ...], weight: tuple[float, ...], p2p: float = 0.0
) -> Durations:
    return Durations(
        forward_s=forward,
        backward_s=tuple(i + w for i, w in zip(into, weight, strict=True)),
        input_s=into,
        weight_s=weight,
        p2p_s=(p2p,) * (len(forward) - 1),
    )


@dataclass(frozen=True)
class Case:
    """Unequal stages. most: chunks that each rank may hold; gap: what is allowed above the bound."""

    times: Durations
    microbatches: int
    placement: tuple[int, ...]
    most: tuple[float, ...]
    gap: float


RING, V = (0, 1, 2, 3) * 2, (0, 1, 2, 3, 3, 2, 1, 0)
HEAVY_HEAD = durations((1, 1, 1, 1.6), (1, 1, 1, 1.6), (1, 1, 1, 1.6))
HEAVY_SECOND = durations((1, 1.5, 1, 1), (1.2, 1.7, 1.1, 1), (0.8, 1.2, 0.9, 0.9))
SIX = ((1.2, 0.8, 1.1, 0.9, 1.0, 1.3), (1.4, 0.9, 1.3, 1.0, 1.1, 1.6), (0.9, 0.7, 1.0, 0.8, 0.8, 1.1))
EIGHT = ((*SIX[0], 0.7, 1.25), (*SIX[1], 0.9, 1.5), (*SIX[2], 0.6, 1.0))
# The stated set: where stages are unequal, or messages take time, or memory is what 1F1B needs, auto must be faster.
CASES = {
    "a heavy head in 1F1B's memory": Case(HEAVY_HEAD, 12, (0, 1, 2, 3), (4, 3, 2, 1), 0.06),
    "a heavy second stage, p in flight": Case(HEAVY_SECOND, 12, (0, 1, 2, 3), (4,) * 4, 0.01),
    "a heavy second stage in 1F1B's memory": Case(HEAVY_SECOND, 12, (0, 1, 2, 3), (4, 3, 2, 1), 0.10),
    "slow messages, twice p in flight": Case(
        durations((1,) * 4, (1,) * 4, (1,) * 4, 0.3), 12, (0, 1, 2, 3), (8,) * 4, 0.03
    ),
    "six uneven stages, slow messages, p in flight": Case(durations(*SIX, 0.5), 12, tuple(range(6)), (6,) * 6, 0.06),
    "six uneven stages in 1F1B's memory": Case(durations(*SIX, 0.1), 12, tuple(range(6)), (6, 5, 4, 3, 2, 1), 0.12),
    "eight uneven stages round and round": Case(durations(*EIGHT, 0.1), 8, RING, (12,) * 4, 0.05),
    "eight uneven stages in a V, slow messages": Case(durations(*EIGHT, 0.5), 8, V, (8,) * 4, 0.05),
}


def made(case: Case) -> Auto:
    limits = Limits.chunks(len(case.placement), case.most)
    return auto_schedule(case.times, case.microbatches, case.placement, limits)


@pytest.mark.parametrize("name", CASES)
def test_it_beats_every_named_schedule_on_the_stated_set(name: str) -> None:
    case = CASES[name]
    auto = made(case)
    ones = (1,) * len(case.placement)
    validate(auto.schedule)
    assert all(p <= m for p, m in zip(peak_bytes(auto.schedule, ones, ones), case.most, strict=True))
    assert replay(order_of(auto.schedule), case.times).step_s == auto.step_s
    assert auto.named is not None
    assert auto.step_s < 0.998 * auto.named_s, (auto.step_s, auto.named, auto.named_s)
    assert auto.bound_s <= auto.step_s <= (1 + case.gap) * auto.bound_s, auto.gap


def test_equal_questions_have_equal_answers() -> None:
    case = CASES["a heavy second stage, p in flight"]
    assert made(case) == made(case)


def test_equal_stages_reach_the_bound_and_zb_h1() -> None:
    auto = auto_schedule(Durations.equal(4, 1, 1, 1), 8, range(4), Limits.chunks(4, (4,) * 4))
    assert (auto.step_s, auto.bound_s, auto.named, auto.gap) == (27, 27, "zb-h1", 0)


def test_whole_backwards_stay_whole() -> None:
    auto = auto_schedule(HEAVY_HEAD, 6, range(4), split=False)
    assert {action.kind for actions in auto.schedule.ranks for action in actions} == {F, B}
    assert auto.named in ("1f1b", "gpipe")


def test_limits_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="no room for one microbatch"):
        auto_schedule(HEAVY_HEAD, 4, range(4), Limits.chunks(4, (1, 1, 0, 1)))


def test_what_an_input_backward_leaves_may_be_more_than_it_gives_back() -> None:
    """Under full recomputation: little is kept for the input backward, much for the weights from there on."""
    limits = Limits(forward_bytes=(1,) * 4, weight_bytes=(10,) * 4, most_bytes=(14.0,) * 4)
    auto = auto_schedule(HEAVY_HEAD, 8, range(4), limits)
    assert max(peak_bytes(auto.schedule, limits.forward_bytes, limits.weight_bytes)) <= 14
    validate(auto.schedule)


sizes = {
    "pp": st.integers(1, 4),
    "v": st.integers(1, 2),
    "microbatches": st.integers(1, 5),
    "room": st.integers(1, 8),
    "random": st.randoms(use_true_random=False),
}


def random_case(pp: int, v: int, random: Random) -> tuple[Durations, tuple[int, ...]]:
    def times() -> tuple[float, ...]:
        return tuple(random.choice((0.5, 1.0, 1.5, 3.0)) for _ in range(pp * v))

    ring = tuple(range(pp)) * v
    placement = (*range(pp), *reversed(range(pp))) if v == 2 and random.random() < 0.5 else ring
    return durations(times(), times(), times(), random.choice((0.0, 0.5))), placement


@given(**sizes)
@settings(max_examples=40, deadline=None)
def test_whatever_the_times_it_is_valid_within_limits_and_above_the_bound(
    pp: int, v: int, microbatches: int, room: int, random: Random
) -> None:
    times, placement = random_case(pp, v, random)
    most = tuple(float(v + room + random.randint(0, 2)) for _ in range(pp))
    auto = auto_schedule(times, microbatches, placement, Limits.chunks(pp * v, most))
    validate(auto.schedule)
    ones = (1,) * (pp * v)
    assert all(p <= m for p, m in zip(peak_bytes(auto.schedule, ones, ones), most, strict=True))
    assert auto.schedule.placement == placement
    assert auto.bound_s <= auto.step_s * (1 + 1e-12)
    assert auto.step_s <= auto.named_s


def every_schedule(pp: int, microbatches: int) -> list[Schedule]:
    """All orders of whole and of halved backwards on `pp` ranks of one stage."""

    def orders(stage: int) -> list[tuple[Action, ...]]:
        found = set()
        for kinds in ([B], [Kind.INPUT, Kind.WEIGHT]):
            actions = [Action(kind, stage, m) for kind in (F, *kinds) for m in range(microbatches)]
            for line in permutations(actions):
                at = {action: i for i, action in enumerate(line)}
                sound = all(
                    at[Action(first, stage, m)] < at[Action(then, stage, m)]
                    for m in range(microbatches)
                    for first, then in [(F, kinds[0]), *([(kinds[0], kinds[1])] if len(kinds) > 1 else [])]
                )
                if sound:
                    found.add(line)
        return sorted(found)

    placement = tuple(range(pp))
    return [Schedule("any", microbatches, placement, ranks) for ranks in product(*(orders(s) for s in placement))]


@pytest.mark.parametrize("most", [(2.0, 2.0), (1.0, 2.0), (float("inf"),) * 2])
def test_the_bound_is_below_every_schedule_there_is(most: tuple[float, float]) -> None:
    """Two ranks, two microbatches: all orders are played, and the best is what auto finds."""
    every = every_schedule(2, 2)
    limits = Limits.chunks(2, most)
    allowed = [schedule for schedule in every if limits.allow(schedule)]
    for seed in range(4):
        random = Random(seed)
        times, placement = random_case(2, 1, random)
        best = float("inf")
        for schedule in allowed:
            try:
                best = min(best, replay(order_of(schedule), times).step_s)
            except ValueError:
                continue
        assert lower_bound(times, placement, 2, limits) <= best * (1 + 1e-12)
        assert auto_schedule(times, 2, placement, limits).step_s == pytest.approx(best, rel=1e-12)


def test_the_bound_is_below_every_named_schedule() -> None:
    for name, (pp, m) in product(("gpipe", "1f1b", "zb-h1", "zbv", "dualpipev"), [(2, 3), (4, 8), (3, 7)]):
        schedule = make_schedule(name, pp, m)
        random = Random(pp)
        times = durations(*(tuple(random.uniform(0.5, 2) for _ in schedule.placement) for _ in range(3)), 0.2)
        ones = (1,) * schedule.stages
        limits = Limits.chunks(schedule.stages, peak_bytes(schedule, ones, ones))
        assert lower_bound(times, schedule.placement, m, limits) <= replay(order_of(schedule), times).step_s
