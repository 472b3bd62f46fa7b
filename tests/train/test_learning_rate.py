"""R83's behaviour: the learning rate at every turn of its course."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trigrid.spec.job import Optimizer
from trigrid.train.learning_rate import learning_rate


def course(steps: int, **optimizer: object) -> list[float]:
    return [learning_rate(Optimizer(lr=1.0, min_lr_ratio=0.1, **optimizer), step, steps) for step in range(steps)]  # type: ignore[arg-type]


def test_the_whole_course() -> None:
    """Linear to the peak at the last step of the warm-up, a cosine to the floor at the last step."""
    rates = course(11, warmup_steps=4)
    assert rates[0] == 0.25
    assert rates[1] == 0.5
    assert rates[3] == 1.0, "the last step of the warm-up"
    assert rates[4] == 1.0, "the cosine begins at its top"
    assert rates[7] == pytest.approx(0.55), "half-way down"
    assert rates[10] == pytest.approx(0.1), "the last step"


def test_linear() -> None:
    assert course(7, warmup_steps=2, decay="linear") == pytest.approx([0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1])


def test_warm_up_stable_decay() -> None:
    """The last fifth of twenty steps goes down: four steps, the last of which is at the floor."""
    rates = course(20, warmup_steps=2, decay="wsd")
    assert rates[1:16] == [1.0] * 15
    assert rates[16:] == pytest.approx([0.775, 0.55, 0.325, 0.1])
    assert course(4, warmup_steps=3, decay="wsd", decay_share=1.0) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


@pytest.mark.parametrize(
    ("steps", "warmup", "rates"),
    [
        (1, 0, [1.0]),
        (1, 1, [1.0]),
        (2, 0, [1.0, 0.1]),
        (2, 1, [1.0, 1.0]),
        (3, 0, [1.0, 0.55, 0.1]),
        (3, 1, [1.0, 1.0, 0.1]),
        (3, 3, [1 / 3, 2 / 3, 1.0]),
    ],
)
def test_short_courses(steps: int, warmup: int, rates: list[float]) -> None:
    assert course(steps, warmup_steps=warmup) == pytest.approx(rates)


@given(
    st.integers(1, 400).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(0, steps))),
    st.sampled_from(["cosine", "linear", "wsd"]),
    st.floats(0.001, 1.0),
)
def test_up_then_down_and_never_zero(given: tuple[int, int], decay: str, share: float) -> None:
    steps, warmup = given
    rates = course(steps, warmup_steps=warmup, decay=decay, decay_share=share)
    assert all(a < b for a, b in pairwise(rates[:warmup]))
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert min(rates) > 0
    assert max(rates) == 1.0


def test_a_step_after_the_last_keeps_the_floor() -> None:
    assert learning_rate(Optimizer(lr=1.0, min_lr_ratio=0.1), 20, 10) == pytest.approx(0.1)
