"""Rank files: byte-level BPE as `tiktoken` has it, a token in base64 and its rank on each line.

The file does not say how text is cut into words, nor which special tokens there are: that is told by the number of
ranks. Patterns: those of GPT-2, cl100k and o200k as tiktoken 0.9 publishes them, and Llama 3's (Meta, tokenizer.py).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trigrid.data.optional import library
from trigrid.data.tokenizer import KEY, PROBE, places_to_probe
from trigrid.errors import Problem, Refused

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
LLAMA3 = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + ENDINGS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + ENDINGS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    """separator: name and id of the special token that ends a document. vocab: special tokens included."""

    name: str
    ranks: int
    pattern: str
    separator: tuple[str, int]
    vocab: int


FAMILIES = (
    Family("gpt2", 50_256, GPT2, ("<|endoftext|>", 50_256), 50_257),
    Family("cl100k", 100_256, CL100K, ("<|endoftext|>", 100_257), 100_277),
    Family("llama3", 128_000, LLAMA3, ("<|end_of_text|>", 128_001), 128_256),
    Family("o200k", 199_998, O200K, ("<|endoftext|>", 199_999), 200_019),
)


class RankTokenizer:
    """A rank file of one of `FAMILIES`; its library is `tiktoken`."""

    def __init__(self, path: Path, threads: int):
        tiktoken = library("tiktoken", KEY, path)
        ranks = read_ranks(path)
        family = next((family for family in FAMILIES if family.ranks == len(ranks)), None)
        if family is None:
            reason = f"holds {len(ranks):,} ranks, and their number tells how text is cut into words"
            raise Refused([Problem(KEY, path, reason, tuple(f"{one.name} ({one.ranks:,})" for one in FAMILIES))])
        name, self.separator = family.separator
        self._encoding = tiktoken.Encoding(
            family.name, pat_str=family.pattern, mergeable_ranks=ranks, special_tokens={name: self.separator}
        )
        self._threads = threads
        self.vocab = family.vocab
        self.library = f"tiktoken {tiktoken.__version__}"
        whole = self._encoding.encode_ordinary(PROBE)
        self.cuttable = all(
            self._encoding.encode_ordinary(PROBE[:place]) + self._encoding.encode_ordinary(PROBE[place:]) == whole
            for place in places_to_probe()
        )

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer[Any]]]:
        batches = self._encoding.encode_ordinary_batch(list(texts), num_threads=self._threads)
        return [np.asarray(ids, dtype=np.int64) for ids in batches]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([int(id) for id in ids]))


def read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens of a rank file. (tiktoken's own reader keeps a copy by the file's name, and would not see a change.)

    Raises Refused, with the line, where it is none.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            reason = f"is no rank file: {error}"
            raise Refused([Problem(KEY, path, reason, where=f"{path}:{number}")]) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise Refused([Problem(KEY, path, f"is no rank file: its {len(ranks):,} ranks are not 0, 1, 2, …")])
    return ranks
