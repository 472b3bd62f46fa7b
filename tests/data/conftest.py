from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from trigrid.data.progress import Progress


@pytest.fixture
def quiet() -> Progress:
    return lambda stage, done, total: None


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder of `files` texts of made-up words, rich enough for a vocabulary of 400."""

    def make(files: int = 30, words: int = 300, name: str = "corpus", seed: int = 0) -> Path:
        chance = random.Random(seed)
        syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "é")]
        vocabulary = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(400)]
        folder = tmp_path / name
        for index in range(files):
            path = folder / f"part{index % 3}" / f"text{index:03}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (" ".join(chance.choices(vocabulary, k=8)) for _ in range(words // 8))
            path.write_text("\n".join(lines) + f"\nend {index}.\n", encoding="utf-8")
        return folder

    return make
