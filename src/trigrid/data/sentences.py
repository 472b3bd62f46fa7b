"""SentencePiece models (Kudo and Richardson 2018), by the optional library `sentencepiece`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trigrid.data.optional import library
from trigrid.data.tokenizer import KEY
from trigrid.errors import Problem, Refused


class SentenceTokenizer:
    """A SentencePiece `.model` file; a document ends with its end-of-sentence token.

    Never cut: a word at the start of a text gets a prefix, and pieces may span words.
    """

    cuttable = False

    def __init__(self, path: Path, threads: int):
        sentencepiece = library("sentencepiece", KEY, path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise Refused([Problem(KEY, path, f"is no SentencePiece model: {error}")]) from None
        self._threads = threads
        self.vocab = int(self._model.vocab_size())
        self.separator = int(self._model.eos_id())
        self.library = f"sentencepiece {sentencepiece.__version__}"
        if self.separator < 0:
            reason = "has no end-of-sentence token to end a document with; train it with eos_id"
            raise Refused([Problem(KEY, path, reason)])

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer[Any]]]:
        batches = self._model.encode(list(texts), out_type=int, num_threads=self._threads)
        return [np.asarray(ids, dtype=np.int64) for ids in batches]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(id) for id in ids]))
