"""Batches of token ids, the same for every layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trigrid.data.sampler import sample_ids
from trigrid.data.tokens import open_tokens
from trigrid.errors import Problem, Refused


class TokenDataset:
    """Samples cut from a token file, one after the other, each sharing its last token with the next one's first.

    Sample i is tokens [i × sequence, i × sequence + sequence + 1) of the stream of all documents; what is left at the
    end is not used. Raises Refused where the stream is shorter than one sample.
    """

    def __init__(self, prefix: Path, sequence: int):
        self._tokens = open_tokens(prefix).tokens
        self.sequence = sequence
        if len(self) == 0:
            reason = f"{prefix} holds {len(self._tokens)} tokens, and one sample takes {sequence + 1}"
            legal = (len(self._tokens) - 1,) if len(self._tokens) > 1 else ()
            raise Refused([Problem("batch.sequence", sequence, reason, legal)])

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.sequence

    def samples(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of each sample [N, sequence + 1]."""
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < len(self)), "sample id out of range"
        starts = ids * self.sequence
        rows: NDArray[np.int64] = self._tokens[starts[:, None] + np.arange(self.sequence + 1)].astype(np.int64)
        return rows


@dataclass(frozen=True)
class Loader:
    """Any batch of an endless, shuffled pass over `dataset`, as a function of the step.

    global_batch counts sequences.
    """

    dataset: TokenDataset
    seed: int
    global_batch: int

    def batch(self, step: int, dp_rank: int, dp: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels, int64 [microbatches, micro_batch, sequence], of one data-parallel rank at `step`.

        The global batch is cut into dp contiguous parts, each into microbatches, each into rows: read in that order it
        is the same for every dp and micro_batch. A label is the next token; -100 marks one to ignore (none here).
        """
        assert 0 <= dp_rank < dp, f"dp_rank = {dp_rank} of dp = {dp}"
        assert self.global_batch % (dp * micro_batch) == 0, f"{self.global_batch} % ({dp} × {micro_batch}) is not 0"
        share = self.global_batch // dp
        ids = sample_ids(
            step=step,
            positions=np.arange(dp_rank * share, (dp_rank + 1) * share),
            global_batch=self.global_batch,
            samples=len(self.dataset),
            seed=self.seed,
        )
        samples = torch.from_numpy(self.dataset.samples(ids)).view(-1, micro_batch, self.dataset.sequence + 1)
        return samples[..., :-1].contiguous(), samples[..., 1:].contiguous()
