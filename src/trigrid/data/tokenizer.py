"""Tokenizers: the one interface that the rest sees, and the file formats behind it, told apart by their content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trigrid.data.pieces import may_cut
from trigrid.errors import Problem, Refused

KEY = "data.tokenizer"
RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
PROBE = (
    "The quick brown fox's 42nd jump\nover 1234567 lazy dogs; it's naïve, isn't it?\n\n\tdef f(x):\n        return x+1"
    "\n1\n2 3 fox  two   three \n x\r\ny z\n日本語。\n今日は 晴れ\nПривет мир\nUPPER Lower\nunder_score x_\nend."
)


class Tokenizer(Protocol):
    """Text to ids and back.

    vocab: all ids are below it. separator: the id that ends a document. cuttable: text may be cut where
    `pieces.may_cut` says without a change of its tokens. library: name and version, which may decide the tokens.
    """

    vocab: int
    separator: int
    cuttable: bool
    library: str

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer[Any]]]:
        """The ids of each text. A text that spells a special token is tokenised as ordinary characters."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


def load_tokenizer(path: Path, threads: int) -> Tokenizer:
    """The tokenizer in a file: `tokenizers` JSON, SentencePiece, or ranks as tiktoken has them (Llama 3's
    `tokenizer.model` too). `threads`: how many may encode a batch.

    Raises Refused for a file that is missing or none of these, whose library is missing, or without a known separator.
    """
    if not path.is_file():
        raise Refused([Problem(KEY, path, "no such file", ("train",))])
    with path.open("rb") as file:
        start = file.read(1 << 12)
    # Each format's module loads its own library.
    if RANK_LINE.match(start):
        from trigrid.data.ranks import RankTokenizer

        return RankTokenizer(path, threads)
    # The first field of a SentencePiece model, the list of its pieces, has the tag 10.
    if start[:1] == b"\n" and not start.lstrip().startswith(b"{"):
        from trigrid.data.sentences import SentenceTokenizer

        return SentenceTokenizer(path, threads)
    from trigrid.data.bpe import JsonTokenizer

    return JsonTokenizer(path, threads)


def check_fits(tokenizer: Tokenizer, path: Path, vocab: int) -> None:
    """Raises Refused where ids of the tokenizer do not fit in a model of `vocab` entries."""
    if tokenizer.vocab > vocab:
        reason = f"{KEY} = {path} has token ids up to {tokenizer.vocab - 1}"
        raise Refused([Problem("model.vocab", vocab, reason, (tokenizer.vocab,))])


def places_to_probe(text: str = PROBE) -> list[int]:
    """Where `PROBE` may be cut: a tokenizer is cuttable when no cut there changes its tokens."""
    return [place for place in range(1, len(text)) if may_cut(text, place)]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
