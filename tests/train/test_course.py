"""Which samples come next, whatever happens to a run."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trigrid.data.sampler import Order
from trigrid.train.course import is_spike, merged, places

SAMPLES = 48
"""Of an epoch."""


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_three_epochs_with_a_resume_in_the_middle_of_each(micro_batch: int) -> None:
    """R76, R77, R78, R94: each sample once per epoch, in the order of a run that was never interrupted, though the
    degree of data parallelism and the batch change at each resume; all ranks have as many microbatches and stand at the
    same place."""
    order, consumed, seen = Order(5, (SAMPLES,)), 0, []
    for dp, global_batch, until in ((1, 8, 24), (2, 12, 72), (4, 8, 120), (3, 6, 144)):
        starts = places(consumed, global_batch, ())
        while consumed < until:
            start = next(starts)
            share = global_batch // dp
            by_rank = [order.at(start + np.arange(rank * share, (rank + 1) * share))[1] for rank in range(dp)]
            assert {len(ids) // micro_batch for ids in by_rank} == {share // micro_batch}
            seen += [int(sample) for ids in by_rank for sample in ids]
            consumed = start + global_batch
    assert consumed == 3 * SAMPLES
    for epoch in range(3):
        assert Counter(seen[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == Counter(range(SAMPLES))
    assert seen == order.at(np.arange(3 * SAMPLES))[1].tolist()


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda s: (s[0], s[0] + s[1])), max_size=5)


@given(skipped=spans, global_batch=st.integers(1, 9), consumed=st.integers(0, 30))
def test_nothing_skipped_is_drawn_and_nothing_twice(
    skipped: list[tuple[int, int]], global_batch: int, consumed: int
) -> None:
    joined: tuple[tuple[int, int], ...] = ()
    for span in skipped:
        joined = merged(joined, span)
    out = {i for start, stop in skipped for i in range(start, stop)}
    assert {i for start, stop in joined for i in range(start, stop)} == out
    assert all(stop < start for (_, stop), (start, _) in pairwise(joined))
    batches = list(islice(places(consumed, global_batch, joined), 20))
    drawn = [i for start in batches for i in range(start, start + global_batch)]
    assert not out & set(drawn)
    assert drawn == sorted(set(drawn))
    # A run that is resumed in the middle draws the same.
    assert list(islice(places(batches[7] + global_batch, global_batch, joined), 12)) == batches[8:]


def test_a_spike() -> None:
    recent = [2.0, 2.2, 1.8, 2.0]
    assert not is_spike(2.4, recent, 4, 4.0)
    assert is_spike(3.0, recent, 4, 4.0)
    assert not is_spike(3.0, recent[:3], 4, 4.0), "too few to judge by"
    assert not is_spike(1.0, recent, 4, 4.0)
    assert not is_spike(float("nan"), recent, 4, 4.0), "the guard's business"
