"""Tokenizers of the library `tokenizers`: its JSON files, and a byte-level BPE trained on a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from trigrid.data.tokenizer import KEY, PROBE, places_to_probe
from trigrid.errors import Problem, Refused

SEPARATOR = "<|endoftext|>"
KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>")
SMALLEST_VOCAB = 256 + 1


class JsonTokenizer:
    """A `tokenizers` JSON file, with the truncation and padding that it may ask for switched off.

    More threads than one are as many as the library likes: all cores, unless TOKENIZERS_PARALLELISM says no.
    """

    def __init__(self, path: Path, threads: int):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
            kinds = "neither a tokenizers JSON file nor a SentencePiece model nor tiktoken ranks"
            raise Refused([Problem(KEY, path, f"is {kinds}: {error}")]) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._threads = threads
        self.vocab = max(self._tokenizer.get_vocab().values()) + 1
        self.separator = _separator_id(self._tokenizer)
        self.cuttable = _is_cuttable(self._tokenizer)
        self.library = f"tokenizers {tokenizers.__version__}"

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer[Any]]]:
        # The library divides a batch among its threads; a batch of one it cannot.
        batches = [[text] for text in texts] if self._threads == 1 else [list(texts)]
        return [
            np.asarray(encoding.ids, dtype=np.int64)
            for batch in batches
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def train_bpe(texts: Iterator[str], vocab: int, path: Path) -> None:
    """Trains a byte-level BPE (Sennrich 2016; on bytes, Radford 2019) of exactly `vocab` entries and writes its file.

    Entries are the separator (id 0), the 256 bytes, then merges; the same texts give the same entries.
    Raises Refused where the texts have too few different pairs to merge.
    """
    check_trainable(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached != vocab:
        reason = f"the corpus is too small: a tokenizer trained on it ends at {reached} entries"
        raise Refused([Problem("model.vocab", vocab, reason, (reached,))])
    tokenizer.save(str(path), pretty=False)


def check_trainable(vocab: int) -> None:
    """Raises Refused for a vocabulary that no byte-level tokenizer can be trained to."""
    if vocab < SMALLEST_VOCAB:
        reason = f"a byte-level tokenizer needs 256 bytes and {SEPARATOR}"
        raise Refused([Problem("model.vocab", vocab, reason, (SMALLEST_VOCAB,))])


def _separator_id(tokenizer: tokenizers.Tokenizer) -> int:
    """The id of the special token that ends a document: the first of `KNOWN_SEPARATORS` that the tokenizer has."""
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for name in KNOWN_SEPARATORS:
        if name in special:
            return special[name]
    reason = "has no special token to end a document with"
    raise Refused([Problem(KEY, ", ".join(special) or "no special token", reason, KNOWN_SEPARATORS)])


def _is_cuttable(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the words that its pre-tokenizer hands to the model end wherever a text may be cut.

    Judged on the words, not on tokens: which words the model would merge depends on its vocabulary.
    """
    words = tokenizer.pre_tokenizer
    if words is None:
        return False
    for token in tokenizer.get_added_tokens_decoder().values():
        if not token.special and (token.lstrip or token.rstrip or places_to_probe(token.content)):
            return False

    def words_of(text: str) -> list[str]:
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        return [word for word, _ in words.pre_tokenize_str(normal)]

    whole = words_of(PROBE)
    places = places_to_probe()
    pieces = [PROBE[start:stop] for start, stop in zip([0, *places], [*places, None], strict=True)]
    return (
        all(words_of(PROBE[:place]) + words_of(PROBE[place:]) == whole for place in places)
        and [word for piece in pieces for word in words_of(piece)] == whole
    )
