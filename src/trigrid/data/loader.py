"""Batches of token ids, the same for every layout and any number of threads that read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from trigrid.data.dataset import TokenDataset
from trigrid.data.sampler import Ints, Order, whole_shares

T = TypeVar("T")

READ_AHEAD = 2
"""Batches in flight for each thread."""


@dataclass(frozen=True)
class Batch:
    """What one data-parallel rank trains on in a step, int64 [microbatches, micro_batch, sequence] each.

    A label is the next token; −100 marks one to ignore (none here). documents numbers the documents of each sequence
    from 0; None where attention crosses their boundaries.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None


class Loader:
    """Any batch of an endless, shuffled pass over `datasets`, as a function of the samples consumed before it.

    weights: shares of the datasets in every batch; empty: all samples are alike. global_batch counts sequences.
    """

    def __init__(
        self,
        datasets: Sequence[TokenDataset],
        *,
        weights: Sequence[float] = (),
        seed: int,
        global_batch: int,
        documents: bool = False,
    ):
        self._datasets = tuple(datasets)
        self._order = Order(seed, tuple(map(len, datasets)), whole_shares(weights) if weights else ())
        self._global_batch = global_batch
        self._documents = documents

    def batch(self, consumed: int, dp_rank: int, dp: int, micro_batch: int) -> Batch:
        """The part of rank `dp_rank` in the batch that follows the first `consumed` samples.

        The global batch is cut into dp contiguous parts, each into microbatches, each into rows: read in that order it
        is the same for every dp and micro_batch.
        """
        assert 0 <= dp_rank < dp, f"dp_rank = {dp_rank} of dp = {dp}"
        assert self._global_batch % (dp * micro_batch) == 0, f"{self._global_batch} % ({dp} × {micro_batch}) is not 0"
        share = self._global_batch // dp
        corpora, ids = self._order.at(consumed + np.arange(dp_rank * share, (dp_rank + 1) * share))
        shape = (share, self._datasets[0].sequence)
        tokens, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        documents = np.empty(shape, dtype=np.int64) if self._documents else None
        for row, (corpus, sample) in enumerate(zip(corpora, ids.tolist(), strict=True)):
            dataset = self._datasets[corpus]
            dataset.read(sample, tokens[row], labels[row])
            if documents is not None:
                dataset.documents(sample, documents[row])

        def cut(rows: Ints) -> Tensor:
            return torch.from_numpy(rows).view(-1, micro_batch, rows.shape[1])

        return Batch(cut(tokens), cut(labels), cut(documents) if documents is not None else None)


def read_ahead(read: Callable[[int], T], steps: Iterable[int], workers: int) -> Iterator[T]:
    """`map(read, steps)`, read by `workers` threads a few steps ahead; by none, each when it is asked for."""
    if not workers:
        yield from map(read, steps)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="data") as pool:
        ahead: deque[Future[T]] = deque()
        for step in steps:
            ahead.append(pool.submit(read, step))
            if len(ahead) > workers * READ_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
