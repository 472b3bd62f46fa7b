"""Tokens per document of a token file, exactly and in memory that does not grow with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trigrid.data.tokens import TokenFile

BLOCK_DOCUMENTS = 1 << 20
COUNTED = 1 << 20
"""Documents below so many tokens are counted by length; the few that are longer are listed."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """median and p99: the smallest length that half, and 99 %, of the documents do not exceed."""

    min: int
    median: int
    mean: float
    p99: int
    max: int


def lengths_of(file: TokenFile) -> Lengths:
    counts = np.zeros(COUNTED, dtype=np.int64)
    long: list[NDArray[np.int64]] = []
    for lengths in _blocks(file):
        counts += np.bincount(lengths[lengths < COUNTED], minlength=COUNTED)
        long.append(lengths[lengths >= COUNTED])
    others = np.sort(np.concatenate(long))
    ends = np.cumsum(counts)

    def quantile(share: float) -> int:
        rank = max(int(np.ceil(share * file.document_count)), 1)
        if rank > ends[-1]:
            return int(others[rank - 1 - int(ends[-1])])
        return int(np.searchsorted(ends, rank))

    return Lengths(
        min=quantile(0),
        median=quantile(0.5),
        mean=len(file.tokens) / file.document_count,
        p99=quantile(0.99),
        max=quantile(1),
    )


def _blocks(file: TokenFile) -> Iterator[NDArray[np.int64]]:
    """Tokens of each document, a block of documents at a time; a document may be several sequences, or none."""
    for start in range(0, file.document_count, BLOCK_DOCUMENTS):
        bounds = file.documents[start : start + BLOCK_DOCUMENTS + 1]
        sequences = file.lengths[bounds[0] : bounds[-1]]
        ends = np.concatenate([[0], np.cumsum(sequences, dtype=np.int64)])
        yield np.diff(ends[bounds - bounds[0]])
