from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.data.sampler import LARGEST_N, Order, blend, order_key, permute, whole_shares

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


counts = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)


@settings(deadline=None)
@given(samples=counts, seed=seeds)
def test_every_sample_once_per_epoch(samples: tuple[int, ...], seed: int) -> None:
    """R76."""
    every = [(corpus, id) for corpus, n in enumerate(samples) for id in range(n)]
    corpora, ids = Order(seed, samples).at(np.arange(3 * len(every)).reshape(3, -1))
    epochs = [list(zip(*pair, strict=True)) for pair in zip(corpora.tolist(), ids.tolist(), strict=True)]
    assert all(sorted(epoch) == every for epoch in epochs)
    if len(every) >= 20:
        assert len(set(map(tuple, epochs))) == 3


@settings(deadline=None, max_examples=15)
@given(samples=counts, data=st.data(), seed=seeds)
def test_a_blend_keeps_its_shares_and_each_corpus_its_epochs(
    samples: tuple[int, ...], data: st.DataObject, seed: int
) -> None:
    weights = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=len(samples), max_size=len(samples)))
    shares, places = whole_shares(weights), 200
    corpora, ids = Order(seed, samples, shares).at(np.arange(places))
    for corpus, n in enumerate(samples):
        here = corpora == corpus
        exact = np.arange(1, places + 1) * (shares[corpus] / sum(shares))
        assert np.abs(np.cumsum(here) - exact).max() < len(samples)
        mine = ids[here]
        for start in range(0, len(mine) - n + 1, n):
            assert sorted(mine[start : start + n].tolist()) == list(range(n))


@settings(deadline=None)
@given(shares=st.lists(st.integers(1, 2**20), min_size=1, max_size=5), start=st.integers(0, 2**40))
def test_turns_of_a_blend_count_without_gaps(shares: list[int], start: int) -> None:
    """From any place on, also far beyond where products of places and shares fit in 64 bits."""
    corpora, turns = blend(np.arange(start, start + 300), shares)
    for corpus in range(len(shares)):
        mine = turns[corpora == corpus]
        assert np.array_equal(mine, np.arange(len(mine)) + (mine[0] if len(mine) else 0))
    alone = [blend(np.array([place]), shares) for place in (start, start + 299)]
    assert [(int(c[0]), int(t[0])) for c, t in alone] == [(corpora[0], turns[0]), (corpora[-1], turns[-1])]


@pytest.mark.parametrize(("weights", "shares"), [((7, 3), (734003, 314573)), ((1,), (2**20,)), ((1e-9, 1), (1, 2**20))])
def test_weights_as_shares(weights: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert whole_shares(weights) == shares


@pytest.mark.parametrize("shares", [(), (3, 1)])
def test_a_place_does_not_depend_on_who_else_is_asked_for(shares: tuple[int, ...]) -> None:
    order = Order(3, (37, 11), shares)
    places = np.arange(1000, 1024)
    whole = np.stack(order.at(places))
    for parts in (2, 3, 4, 6, 24):
        pieces = [np.stack(order.at(part)) for part in places.reshape(parts, -1)]
        assert np.array_equal(np.concatenate(pieces, axis=1), whole)
    assert np.array_equal(np.stack(order.at(places[::-1].reshape(4, 6))), whole[:, ::-1].reshape(2, 4, 6))


@pytest.mark.parametrize("shares", [(), (3, 1)])
def test_ten_billion_samples_in_constant_memory(shares: tuple[int, ...]) -> None:
    n = 10**10
    order = Order(0, (n // 2, n // 2), shares)
    tracemalloc.start()
    corpora, ids = order.at(n // 4096 * 4096 + np.arange(4096))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20
    assert len(np.unique(np.stack([corpora, ids]), axis=1).T) == 4096
    assert 0.45 < ids.mean() / (n / 2) < 0.55
