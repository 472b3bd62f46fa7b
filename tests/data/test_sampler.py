from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.data.sampler import LARGEST_N, order_key, permute, sample_ids

keys = st.integers(0, 2**64 - 1)
seeds = st.integers(0, 2**31)


@settings(deadline=None)
@given(n=st.integers(1, 2000), key=keys)
def test_a_bijection(n: int, key: int) -> None:
    assert np.sort(permute(np.arange(n), n, key)).tolist() == list(range(n))


@pytest.mark.parametrize("n", range(1, 70))
def test_a_bijection_for_every_small_n(n: int) -> None:
    assert sorted(permute(np.arange(n), n, 12345).tolist()) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(1, LARGEST_N), key=keys, data=st.data())
def test_an_index_goes_alone_where_it_goes_in_company(n: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    together = permute(index, n, key)
    assert together.min() >= 0
    assert together.max() < n
    assert [int(permute(one, n, key)) for one in index] == together.tolist()
    assert len(set(together.tolist())) == len(set(index))


@settings(deadline=None)
@given(n=st.integers(40, 2000), seed=seeds, epoch=st.integers(0, 1000))
def test_another_seed_or_epoch_is_another_order(n: int, seed: int, epoch: int) -> None:
    orders = [
        tuple(permute(np.arange(n), n, order_key(*key)))
        for key in ((seed, epoch), (seed + 1, epoch), (seed, epoch + 1))
    ]
    assert len({*orders, tuple(range(n))}) == 4


def chi_square_per_degree(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum() / (counts.size - 1))


def test_orders_look_random() -> None:
    n, orders = 50, 3000
    places = np.stack([permute(np.arange(n), n, order_key(seed, 0)) for seed in range(orders)])
    landing = np.stack([np.bincount(places[:, index], minlength=n) for index in range(n)])
    assert 0.8 < chi_square_per_degree(landing) < 1.2
    steps = np.bincount(((places[:, 1:] - places[:, :-1]) % n).reshape(-1), minlength=n)[1:]
    assert chi_square_per_degree(steps) < 1.8
    all_of_three = {tuple(permute(np.arange(3), 3, order_key(seed, 0))) for seed in range(100)}
    assert len(all_of_three) == 6


def test_the_order_never_changes() -> None:
    """A run that goes on after an upgrade must see the samples that it would have seen."""
    assert order_key(0, 0) == 18023098789252811899
    assert permute(np.arange(8), 8, 0).tolist() == [0, 5, 1, 2, 7, 3, 4, 6]
    assert permute(np.arange(4), 10**10, 2**64 - 1).tolist() == [4829695701, 4008998407, 8343425399, 4309720973]


@settings(deadline=None)
@given(samples=st.integers(1, 60), global_batch=st.integers(1, 70), seed=seeds)
def test_every_sample_once_per_epoch_also_across_batches(samples: int, global_batch: int, seed: int) -> None:
    steps = -(-3 * samples // global_batch)
    batches = [
        sample_ids(step=step, positions=np.arange(global_batch), global_batch=global_batch, samples=samples, seed=seed)
        for step in range(steps)
    ]
    stream = np.concatenate(batches)[: 3 * samples].reshape(3, samples)
    assert np.array_equal(np.sort(stream, axis=1), np.tile(np.arange(samples), (3, 1)))
    if samples >= 20:
        assert len(np.unique(stream, axis=0)) == 3


def test_a_position_does_not_depend_on_who_else_is_asked_for() -> None:
    common = {"step": 7, "global_batch": 24, "samples": 37, "seed": 3}
    whole = sample_ids(positions=np.arange(24), **common)
    for parts in (2, 3, 4, 6, 24):
        pieces = [sample_ids(positions=positions, **common) for positions in np.arange(24).reshape(parts, -1)]
        assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(sample_ids(positions=np.arange(24)[::-1].reshape(4, 6), **common), whole[::-1].reshape(4, 6))


def test_ten_billion_samples_in_constant_memory() -> None:
    n = 10**10
    tracemalloc.start()
    ids = sample_ids(step=n // 4096, positions=np.arange(4096), global_batch=4096, samples=n, seed=0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20
    assert len(np.unique(ids)) == 4096
    assert 0.45 < ids.mean() / n < 0.55
