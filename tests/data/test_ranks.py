"""Rank files and SentencePiece models, against what the libraries make of the same files."""

from __future__ import annotations

import base64
import io
import random
import string
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from trigrid.data.ranks import FAMILIES, Family, read_ranks
from trigrid.data.sentences import SentenceTokenizer
from trigrid.data.tokenizer import load_tokenizer
from trigrid.errors import Refused

TEXTS = [
    "the Quick brown fox's 12345 jumps\n\n  over 日本語 lazy dogs' backs...",
    "",
    "<|endoftext|></s>",
    " x\r\n\ty ",
]


def write_ranks(path: Path, count: int) -> Path:
    """256 bytes, English-looking pairs and words, and as many other tokens as it takes."""
    chance = random.Random(0)
    words = ["th", "he", " t", " the", "an", "in", "er", "qu", "ick", " over", "12", "34", "og", "ogs", "\n\n", "  "]
    tokens = dict.fromkeys([bytes([byte]) for byte in range(256)] + [word.encode() for word in words])
    while len(tokens) < count:
        tokens["".join(chance.choices(string.ascii_letters, k=chance.randint(3, 6))).encode()] = None
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_ranks_are_what_tiktoken_makes_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    # As Llama 3 names it: the content tells.
    path = write_ranks(tmp_path / "tokenizer.model", family.ranks)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    name, separator = family.separator
    theirs = tiktoken.Encoding(
        "theirs", pat_str=family.pattern, mergeable_ranks=load_tiktoken_bpe(str(path)), special_tokens={name: separator}
    )
    ours = load_tokenizer(path, 2)
    assert [ids.tolist() for ids in ours.encode_batch(TEXTS)] == [theirs.encode_ordinary(text) for text in TEXTS]
    assert [ours.decode(ids.tolist()) for ids in ours.encode_batch(TEXTS)] == TEXTS
    assert (ours.separator, ours.vocab, ours.cuttable) == (separator, family.vocab, True)
    assert theirs.encode(name, allowed_special="all") == [separator]


def test_patterns_are_the_libraries_own() -> None:
    """tiktoken publishes three of them, in functions that load the ranks as well."""
    from tiktoken_ext import openai_public

    patterns = {family.name: family.pattern for family in FAMILIES}
    assert patterns["gpt2"] == openai_public.r50k_pat_str
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **named: {})
        for name in ("cl100k", "o200k"):
            described = openai_public.ENCODING_CONSTRUCTORS[f"{name}_base"]()
            assert patterns[name] == described["pat_str"]
            family = next(family for family in FAMILIES if family.name == name)
            assert described["special_tokens"][family.separator[0]] == family.separator[1]
            assert family.vocab == max(described["special_tokens"].values()) + 1


def test_a_number_of_ranks_that_nobody_uses_is_refused(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "few.tiktoken", 300)
    with pytest.raises(Refused, match=r"few\.tiktoken: holds 300 ranks, .*nearest legal: gpt2 \(50,256\), cl100k"):
        load_tokenizer(path, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== 0\nYg= 1\n", r"r\.tiktoken:2: .*is no rank file"),
        (b"YQ== 0\nYg== x\n", r"r\.tiktoken:2: .*is no rank file"),
        (b"YQ== 0\nYg==\n", r"r\.tiktoken:2: .*is no rank file"),
        (b"YQ== 0\nYg== 2\n", r"its 2 ranks are not 0, 1, 2"),
    ],
)
def test_a_damaged_rank_file_is_told_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "r.tiktoken").write_bytes(content)
    with pytest.raises(Refused, match=message):
        read_ranks(tmp_path / "r.tiktoken")


def train_sentences(path: Path, **options: Any) -> Path:
    model = io.BytesIO()
    chance = random.Random(0)
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 7))) for _ in range(200)]
    sentences = [" ".join(chance.choices(words, k=10)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=400, byte_fallback=True, **options
    )
    path.write_bytes(model.getvalue())
    return path


def test_sentencepiece_is_what_the_library_makes_of_it(tmp_path: Path) -> None:
    path = train_sentences(tmp_path / "tokenizer.model", minloglevel=2)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = load_tokenizer(path, 2)
    assert isinstance(ours, SentenceTokenizer)
    encoded = [ids.tolist() for ids in ours.encode_batch(TEXTS)]
    assert encoded == theirs.encode(TEXTS)
    assert [ours.decode(ids) for ids in encoded] == [theirs.decode(ids) for ids in encoded]
    assert (ours.separator, ours.vocab, ours.cuttable) == (theirs.eos_id(), 400, False)
    assert not any(ours.separator in ids for ids in encoded)


def test_a_sentencepiece_model_without_an_end_is_refused(tmp_path: Path) -> None:
    path = train_sentences(tmp_path / "m.model", eos_id=-1, minloglevel=2)
    with pytest.raises(Refused, match="has no end-of-sentence token"):
        load_tokenizer(path, 1)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(Refused, match="is no SentencePiece model"):
        load_tokenizer(path, 1)


@pytest.mark.parametrize("name", ["tiktoken", "sentencepiece"])
def test_a_missing_library_is_named_with_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make = write_ranks if name == "tiktoken" else train_sentences
    path = make(tmp_path / "t.model", 300) if name == "tiktoken" else make(tmp_path / "t.model")  # type: ignore
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"data.tokenizer = .*t\.model: needs the library {name}.*pip install 'trigrid\[data\]'"
    with pytest.raises(Refused, match=message):
        load_tokenizer(path, 1)
