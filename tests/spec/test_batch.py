"""The batch equation, from every sufficient subset and out of every contradiction. R82."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.spec.batch import BatchNumbers, solve_batch

NAMES = ("global_batch", "dp", "micro_batch", "accumulation")
small = st.integers(1, 40)


@settings(max_examples=50)
@given(dp=small, micro_batch=small, accumulation=small)
def test_any_sufficient_subset_gives_the_same_numbers(dp: int, micro_batch: int, accumulation: int) -> None:
    """R82: any three determine the fourth, and what is 1 need not be given, micro_batch before dp."""
    whole = {
        "global_batch": dp * micro_batch * accumulation,
        "dp": dp,
        "micro_batch": micro_batch,
        "accumulation": accumulation,
    }
    subsets = [set(NAMES), *(set(three) for three in combinations(NAMES, 3))]
    if micro_batch == 1:
        subsets += [{"global_batch", "accumulation"}, {"global_batch", "dp"}, {"dp", "accumulation"}]
    if dp == 1:
        subsets += [{"global_batch", "micro_batch"}, {"micro_batch", "accumulation"}]
    if dp == micro_batch == 1:
        subsets += [{"global_batch"}, {"accumulation"}]
    for subset in subsets:
        assert solve_batch(**{name: whole[name] for name in subset}) == BatchNumbers(**whole), subset


def test_too_little_is_told_with_the_equation() -> None:
    for subset in ({}, {"dp": 2}, {"micro_batch": 3}, {"dp": 2, "micro_batch": 3}):
        assert str(solve_batch(**subset)) == (
            "batch.global_batch = (not given): needed, or batch.accumulation: "
            "global_batch = dp · micro_batch · accumulation"
        )


@settings(max_examples=150, deadline=None)
@given(four=st.tuples(*[st.none() | st.integers(1, 9)] * 4).filter(lambda four: four[0] or four[3]))
def test_numbers_that_do_not_fit_name_the_nearest_that_do(four: tuple[int | None, ...]) -> None:
    """R82: a legal value makes the rest fit, and brute force finds none nearer."""
    known = {name: number for name, number in zip(NAMES, four, strict=True) if number}
    solved = solve_batch(**known)
    if isinstance(solved, BatchNumbers):
        numbers = {name: getattr(solved, name) for name in NAMES}
        assert numbers["global_batch"] == numbers["dp"] * numbers["micro_batch"] * numbers["accumulation"]
        assert known.items() <= numbers.items()
        return
    name = solved.key.removeprefix("batch.")
    assert solved.value == known[name]
    fitting = [n for n in range(1, 9**3 + 9) if isinstance(solve_batch(**{**known, name: n}), BatchNumbers)]
    below, above = [n for n in fitting if n < known[name]], [n for n in fitting if n > known[name]]
    assert solved.legal == (*below[-1:], *above[:1])


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (
            {"global_batch": 30, "dp": 4, "micro_batch": 2},
            "batch.global_batch = 30: global_batch = dp · micro_batch · accumulation = 4 · 2 · accumulation "
            "must hold for a whole accumulation; nearest legal: 24, 32",
        ),
        (
            {"global_batch": 30, "dp": 4, "accumulation": 2},
            "batch.global_batch = 30: global_batch = dp · micro_batch · accumulation = 4 · micro_batch · 2 "
            "must hold for a whole micro_batch; nearest legal: 24, 32",
        ),
        (
            {"global_batch": 3, "accumulation": 4},
            "batch.global_batch = 3: global_batch = dp · micro_batch · accumulation = dp · 1 · 4 "
            "must hold for a whole dp; nearest legal: 4",
        ),
        (
            {"global_batch": 24, "dp": 4, "micro_batch": 2, "accumulation": 2},
            "batch.accumulation = 2: global_batch = dp · micro_batch · accumulation = 4 · 2 · 2 = 16, "
            "but batch.global_batch = 24; nearest legal: 3",
        ),
        (
            {"global_batch": 30, "dp": 4, "micro_batch": 2, "accumulation": 2},
            "batch.global_batch = 30: global_batch = dp · micro_batch · accumulation = 4 · 2 · 2 = 16 must hold; "
            "nearest legal: 16",
        ),
    ],
)
def test_the_equation_is_filled_in(known: dict[str, int], message: str) -> None:
    """R82."""
    assert str(solve_batch(**known)) == message
