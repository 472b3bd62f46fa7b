"""Schedules of many microbatches by their beginning and end: the same as played in full."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.schedule import NAMES, Durations, end_s, make_schedule, order_of, replay, steady


def durations(random: Random, stages: int, kind: str) -> Durations:
    def times(count: int, most: float) -> tuple[float, ...]:
        if kind == "equal":
            return (random.uniform(0.1, most),) * count
        if kind == "whole":
            return tuple(float(random.randint(0, int(most))) for _ in range(count))
        return tuple(random.uniform(0.0, most) for _ in range(count))

    into, weight = times(stages, 3), times(stages, 3)
    return Durations(
        forward_s=times(stages, 3),
        backward_s=tuple(map(sum, zip(into, weight, strict=True))),
        input_s=into,
        weight_s=weight,
        p2p_s=times(stages - 1, random.choice((0.2, 1.5, 6.0))),
    )


@given(
    name=st.sampled_from(NAMES),
    pp=st.integers(1, 4),
    microbatches=st.integers(1, 150),
    v=st.integers(1, 3),
    kind=st.sampled_from(["equal", "whole", "any"]),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=80, deadline=None)
def test_the_end_is_that_of_the_full_replay(
    name: str, pp: int, microbatches: int, v: int, kind: str, random: Random
) -> None:
    schedule = make_schedule(name, pp, microbatches, v if name == "interleaved" else None)
    times = durations(random, schedule.stages, kind)
    full = replay(order_of(schedule), times).step_s
    assert end_s(name, pp, microbatches, schedule.stages // pp, times) == pytest.approx(full, rel=1e-10)


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)])
def test_thousands_of_microbatches_are_not_written_out(name: str, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], steady.order_for

    def counted(name: str, pp: int, microbatches: int, virtual: int) -> object:
        made.append(microbatches)
        return real(name, pp, microbatches, virtual)

    monkeypatch.setattr(steady, "order_for", counted)
    times = Durations.equal(4 * v, 1.0, 1.5, 0.5)
    first, more = (end_s(name, 4, m, v, times) for m in (100_000, 100_004))
    assert max(made) < 100
    assert more - first == pytest.approx(4 * v * 3.0)


def test_what_does_not_repeat_every_round_is_played_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip that decides takes other than four microbatches to repeat."""
    made, real = [], steady.order_for

    def counted(name: str, pp: int, microbatches: int, virtual: int) -> object:
        made.append(microbatches)
        return real(name, pp, microbatches, virtual)

    monkeypatch.setattr(steady, "order_for", counted)
    backward = (2.0, 0.0, 1.0, 0.0)
    times = Durations(
        forward_s=(2.0, 0.0, 1.0, 1.0),
        backward_s=backward,
        input_s=backward,
        weight_s=(0.0,) * 4,
        p2p_s=(3.0, 6.0, 0.0),
    )
    full = replay(order_of(make_schedule("1f1b", 4, 90)), times).step_s
    assert end_s("1f1b", 4, 90, 1, times) == full
    assert made == [50, 90]
