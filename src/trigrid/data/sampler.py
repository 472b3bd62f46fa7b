"""The order of samples: endless shuffled passes over one or more corpora, with no state and no memory that grows.

A place counts samples from the start of training: whoever knows how many were consumed knows what comes next. It knows
nothing of ranks, micro-batches or workers, so that every layout sees the same samples in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
UInts = NDArray[np.uint64]

ROUNDS = 8
SMALLEST_HALF_BITS = 3
LARGEST_N = 2**62
ALL_SHARES = 2**20
"""Weights are rounded to this many equal shares: one millionth is the finest."""


@dataclass(frozen=True)
class Order:
    """samples: the number of samples of each corpus. shares: whole shares of each in every stretch of places (see
    `whole_shares`); empty: the corpora are shuffled together, so that an epoch holds each sample once.
    """

    seed: int
    samples: tuple[int, ...]
    shares: tuple[int, ...] = ()

    def at(self, places: ArrayLike) -> tuple[Ints, Ints]:
        """The corpus, and the sample of it, at each of `places`; both of their shape.

        With shares, each corpus goes through its own epochs at its own pace.
        """
        where = np.asarray(places, dtype=np.int64)
        if not self.shares:
            ids = _shuffled(where, sum(self.samples), self.seed, "")
            ends = np.cumsum(self.samples, dtype=np.int64)
            corpora = np.searchsorted(ends, ids, side="right")
            return corpora, ids - (ends - self.samples)[corpora]
        corpora, turns = blend(where, self.shares)
        ids = np.empty_like(turns)
        for corpus, samples in enumerate(self.samples):
            here = corpora == corpus
            ids[here] = _shuffled(turns[here], samples, self.seed, f", corpus {corpus}")
        return corpora, ids


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """`weights` as whole shares of about `ALL_SHARES`, at least one each."""
    total = sum(weights)
    return tuple(max(1, round(weight / total * ALL_SHARES)) for weight in weights)


def blend(places: Ints, shares: Sequence[int]) -> tuple[Ints, Ints]:
    """The corpus at each of `places`, and how many places before it belong to the same corpus.

    Corpora take turns as evenly as whole samples can: among any first n places a corpus of share s in a total of t has
    n · s ÷ t of them, give or take less than one for each corpus. The line of all corpora but the last is spread over
    the line of all as Bresenham (1965) spreads the steps of a slope, then all but the last two over that, and so on.
    """
    corpora = np.zeros_like(places)
    turns = np.array(places)
    for last in range(len(shares) - 1, 0, -1):
        here = corpora == 0
        before, total = sum(shares[:last]), sum(shares[: last + 1])
        below = _spread(turns[here], before, total)
        mine = below == _spread(turns[here] + 1, before, total)
        corpora[here] = np.where(mine, last, 0)
        turns[here] = np.where(mine, turns[here] - below, below)
    return corpora, turns


def _spread(count: Ints, part: int, total: int) -> Ints:
    """round(count · part ÷ total), without a product that outgrows 64 bits."""
    whole, rest = np.divmod(count, total)
    spread: Ints = whole * part + (rest * part + total // 2) // total
    return spread


def _shuffled(turns: Ints, samples: int, seed: int, corpus: str) -> Ints:
    """The sample, in [0, samples), at each turn of an endless pass in which every epoch has its own order."""
    epochs = turns // samples
    ids = np.empty_like(turns)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = permute(turns[here] % samples, samples, order_key(seed, int(epoch), corpus))
    return ids


def order_key(seed: int, epoch: int, corpus: str = "") -> int:
    """The 64-bit key of one epoch's order."""
    digest = hashlib.sha256(f"order of samples: seed {seed}, epoch {epoch}{corpus}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def permute(index: ArrayLike, n: int, key: int) -> Ints:
    """Where each `index` in [0, n) goes under the permutation of [0, n) that `key` names; same shape as `index`.

    A balanced Feistel network (Luby and Rackoff 1988) permutes the smallest [0, 4^b) that holds n, b at least 3; a
    value that falls outside [0, n) is sent through again until it falls inside (cycle walking, Black and Rogaway 2002):
    at most 4 passes on average for n above 15. Memory is that of `index`, whatever n.
    """
    assert 0 < n <= LARGEST_N, f"n = {n}"
    start = np.asarray(index, dtype=np.int64)
    assert start.size == 0 or (start.min() >= 0 and start.max() < n), f"index outside [0, {n})"
    half_bits = max(((n - 1).bit_length() + 1) // 2, SMALLEST_HALF_BITS)
    round_keys = _mix(np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
    values = _feistel(start.reshape(-1).astype(np.uint64), half_bits, round_keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], half_bits, round_keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(start.shape)


def _feistel(values: UInts, half_bits: int, round_keys: UInts) -> UInts:
    half, unused = np.uint64(half_bits), np.uint64(64 - half_bits)
    left, right = values >> half, values & np.uint64((1 << half_bits) - 1)
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) >> unused)
    return (left << half) | right


def _mix(values: UInts) -> UInts:
    """A bijection of 64-bit words; every input bit reaches every output bit (splitmix64's, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
