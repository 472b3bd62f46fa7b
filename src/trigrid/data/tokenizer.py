"""Byte-level BPE tokenizers: training one, loading one, and what both promise to the token files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trigrid.errors import Problem, Refused

SEPARATOR = "<|endoftext|>"
KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>")
SMALLEST_VOCAB = 256 + 1


def train_tokenizer(texts: Iterator[str], vocab: int) -> Tokenizer:
    """A byte-level BPE (Sennrich 2016; on bytes, Radford 2019) of exactly `vocab` entries.

    Entries are the separator (id 0), the 256 bytes, then merges; the same texts give the same entries.
    Raises Refused where the texts have too few different pairs to merge.
    """
    if vocab < SMALLEST_VOCAB:
        reason = f"a byte-level tokenizer needs 256 bytes and {SEPARATOR}"
        raise Refused([Problem("model.vocab", vocab, reason, (SMALLEST_VOCAB,))])
    tokenizer = Tokenizer(models.BPE())
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
    return tokenizer


def load_tokenizer(path: Path, vocab: int) -> Tokenizer:
    """The tokenizer of a `tokenizers` JSON file, with the truncation and padding that it may ask for switched off.

    Raises Refused for a file that is missing or no tokenizer, one without a known separator, and one whose ids do not
    fit in a model of `vocab` entries.
    """
    key = "data.tokenizer"
    if not path.is_file():
        raise Refused([Problem(key, path, "no such file", ("train",))])
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise Refused([Problem(key, path, f"is not a tokenizers JSON file: {error}")]) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    separator_id(tokenizer)
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab:
        raise Refused([Problem("model.vocab", vocab, f"{key} = {path} has token ids up to {needed - 1}", (needed,))])
    return tokenizer


def separator_id(tokenizer: Tokenizer) -> int:
    """The id of the special token that ends a document: the first of `KNOWN_SEPARATORS` that the tokenizer has.

    Raises Refused where it has none of them.
    """
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for name in KNOWN_SEPARATORS:
        if name in special:
            return special[name]
    reason = "has no special token to end a document with"
    raise Refused([Problem("data.tokenizer", ", ".join(special) or "no special token", reason, KNOWN_SEPARATORS)])


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
