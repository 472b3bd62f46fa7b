from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trigrid.data.bpe import train_bpe
from trigrid.data.progress import Progress
from trigrid.data.sets import TokenSet
from trigrid.data.tokenizer import load_tokenizer
from trigrid.data.tokens import open_tokens

VOCAB = 400
SYLLABLES = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "é")]


@pytest.fixture
def quiet() -> Progress:
    return lambda stage, done, total: None


@pytest.fixture(scope="session")
def make_text() -> Callable[..., str]:
    """A text of made-up words, rich enough for a vocabulary of 400."""

    def make(words: int, seed: int) -> str:
        chance = random.Random(0)
        vocabulary = ["".join(chance.choices(SYLLABLES, k=chance.randint(1, 4))) for _ in range(400)]
        chance = random.Random(seed)
        lines = (" ".join(chance.choices(vocabulary, k=8)) for _ in range(words // 8))
        return "\n".join(lines) + f"\nend {seed}.\n"

    return make


@pytest.fixture
def make_corpus(tmp_path: Path, make_text: Callable[..., str]) -> Callable[..., Path]:
    """Writes a folder of `files` such texts."""

    def make(files: int = 30, words: int = 300, name: str = "corpus", seed: int = 0) -> Path:
        folder = tmp_path / name
        for index in range(files):
            path = folder / f"part{index % 3}" / f"text{index:03}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make_text(words, seed + index), encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory, make_text: Callable[..., str]) -> Path:
    """A byte-level BPE of 400 entries."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter([make_text(3000, 0)]), VOCAB, path)
    return path


@pytest.fixture(scope="session")
def texts_of() -> Callable[[TokenSet, Path], list[str]]:
    """The documents of a set, decoded; each must end with its separator, which no other token of it is."""

    def texts(tokens: TokenSet, tokenizer_path: Path) -> list[str]:
        file, tokenizer = open_tokens(tokens.prefix), load_tokenizer(tokenizer_path, 1)
        found = []
        for document in range(tokens.first_document, tokens.stop_document):
            ids = np.asarray(file.tokens[file.begins(document) : file.begins(document + 1)])
            assert np.flatnonzero(ids == tokenizer.separator).tolist() == [len(ids) - 1]
            found.append(tokenizer.decode(ids[:-1].tolist()))
        assert len(found) == tokens.documents
        assert tokens.tokens == file.begins(tokens.stop_document) - file.begins(tokens.first_document)
        return found

    return texts
