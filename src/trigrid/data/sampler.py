"""Which sample comes when: a function of seed, epoch and place, with no state and no memory that grows.

A sample's place is `step × global_batch + position`, where `position` counts within the global batch. It knows nothing
of ranks, micro-batches or workers, so that every layout sees the same samples in the same order.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

UInts = NDArray[np.uint64]

ROUNDS = 8
SMALLEST_HALF_BITS = 3
LARGEST_N = 2**62


def sample_ids(*, step: int, positions: ArrayLike, global_batch: int, samples: int, seed: int) -> NDArray[np.int64]:
    """The dataset's sample, in [0, samples), at each position of the global batch of `step`; same shape as `positions`.

    Places go on from epoch to epoch, also inside a batch: epoch = place // samples.
    """
    places = step * global_batch + np.asarray(positions, dtype=np.int64)
    epochs = places // samples
    ids = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = permute(places[here] % samples, samples, order_key(seed, int(epoch)))
    return ids


def order_key(seed: int, epoch: int) -> int:
    """The 64-bit key of one epoch's order."""
    digest = hashlib.sha256(f"order of samples: seed {seed}, epoch {epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def permute(index: ArrayLike, n: int, key: int) -> NDArray[np.int64]:
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
