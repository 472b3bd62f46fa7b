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
        samples = self._rows(corpora, ids, 1, TokenDataset.read).view(-1, micro_batch, self._sequence + 1)
        documents = self._rows(corpora, ids, 0, TokenDataset.documents) if self._documents else None
        return Batch(
            tokens=samples[..., :-1].contiguous(),
            labels=samples[..., 1:].contiguous(),
            documents=documents.view(-1, micro_batch, self._sequence) if documents is not None else None,
        )

    @property
    def _sequence(self) -> int:
        return self._datasets[0].sequence

    def _rows(self, corpora: Ints, ids: Ints, more: int, fill: Callable[[TokenDataset, int, Ints], None]) -> Tensor:
        rows = np.empty((len(ids), self._sequence + more), dtype=np.int64)
        for corpus, sample, row in zip(corpora, ids, rows, strict=True):
            fill(self._datasets[corpus], int(sample), row)
        return torch.from_numpy(rows)


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
