"""Samples of one token file."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import numpy as np

from trigrid.data.sampler import Ints
from trigrid.data.tokens import open_tokens
from trigrid.errors import Problem, Refused


class TokenDataset:
    """Samples cut from documents [first_document, stop_document) of a token file, one after the other, each sharing its
    last token with the next one's first. Ids are below `vocab`.

    Sample i is tokens [i × sequence, i × sequence + sequence + 1) of the stream of those documents; what is left at the
    end is not used. Raises Refused where the stream is shorter than one sample.
    """

    def __init__(
        self, prefix: Path, sequence: int, vocab: int, first_document: int = 0, stop_document: int | None = None
    ):
        self._file = open_tokens(prefix)
        self._vocab = vocab
        # A plain view: every slice of a memmap makes another memmap, at ten times the cost of reading a short sample.
        self._tokens = np.asarray(self._file.tokens)
        self._begin = self._file.begins(first_document)
        end = self._file.begins(self._file.document_count if stop_document is None else stop_document)
        self._length = end - self._begin
        self.sequence = sequence
        if len(self) == 0:
            reason = f"{prefix} holds {self._length} tokens, and one sample takes {sequence + 1}"
            legal = (self._length - 1,) if self._length > 1 else ()
            raise Refused([Problem("batch.sequence", sequence, reason, legal)])

    def __len__(self) -> int:
        return (self._length - 1) // self.sequence

    def read(self, sample: int, tokens: Ints, labels: Ints) -> None:
        """Fill `tokens` and `labels`, each [sequence], with those of `sample` and those one place further.

        Raises Refused for an id that the model does not have: tensor parallelism would take it for one of another rank.
        """
        start = self._start(sample)
        # A copy gives up the interpreter's lock: other threads go on while this one waits for the disk.
        np.copyto(tokens, self._tokens[start : start + self.sequence])
        np.copyto(labels, self._tokens[start + 1 : start + self.sequence + 1])
        for ids in (tokens, labels):
            # As unsigned numbers, ids below 0 are the largest.
            if ids.view(np.uint64).max() >= self._vocab:
                wrong = int(ids[ids.view(np.uint64) >= self._vocab][0])
                legal = (wrong + 1,) if wrong > 0 else ()
                raise Refused([Problem("model.vocab", self._vocab, f"{self._file.prefix} holds the id {wrong}", legal)])

    def documents(self, sample: int, out: Ints) -> None:
        """Fill `out` [sequence] with the number of each token's document, from 0 in each sample."""
        start = self._start(sample)
        document = bisect_right(range(self._file.document_count), start, key=self._file.begins) - 1
        number, place = 0, 0
        while place < self.sequence:
            document += 1
            end = min(self._file.begins(document) - start, self.sequence)
            out[place:end] = number
            # A document without a token begins where the next one does.
            number += end > place
            place = max(place, end)

    def _start(self, sample: int) -> int:
        assert 0 <= sample < len(self), "sample id out of range"
        return self._begin + sample * self.sequence
