from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from trigrid.data.corpus import read_pieces, survey
from trigrid.data.progress import Progress
from trigrid.data.tokenizer import SEPARATOR, load_tokenizer, separator_id, train_tokenizer
from trigrid.errors import Refused

WORDS = "the quick brown foxes jumped over 42 lazy dogs; it's naïve, isn't it?\n\n\tdef f(x):\n        return x+1  \r\n"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(iter([WORDS] * 3), 300)


def test_training_gives_exactly_the_vocabulary_and_the_same_twice(trained: Tokenizer) -> None:
    assert trained.get_vocab_size() == 300
    assert sorted(trained.get_vocab().values()) == list(range(300))
    assert separator_id(trained) == 0
    assert train_tokenizer(iter([WORDS] * 3), 300).to_str() == trained.to_str()


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives(trained: Tokenizer, text: str) -> None:
    if SEPARATOR not in text:
        assert trained.decode(trained.encode(text).ids) == text


def test_a_corpus_too_small_says_how_far_it_reaches() -> None:
    with pytest.raises(Refused) as refused:
        train_tokenizer(iter([WORDS]), 5000)
    (problem,) = refused.value.problems
    (reachable,) = problem.legal
    assert (problem.key, problem.value) == ("model.vocab", 5000)
    assert f"{reachable} entries" in problem.reason
    assert train_tokenizer(iter([WORDS]), int(str(reachable))).get_vocab_size() == reachable


def test_fewer_entries_than_bytes_are_refused() -> None:
    with pytest.raises(Refused, match=r"model.vocab = 256: .*nearest legal: 257"):
        train_tokenizer(iter([WORDS]), 256)
    assert train_tokenizer(iter([WORDS]), 257).get_vocab_size() == 257


def test_errors_of_the_text_pass_through_training() -> None:
    def texts() -> object:
        yield WORDS
        raise Refused([])

    with pytest.raises(Refused):
        train_tokenizer(texts(), 300)  # type: ignore[arg-type]


def llama3_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    return tokenizer


@pytest.mark.parametrize("make", [lambda: train_tokenizer(iter([WORDS] * 3), 300), llama3_like])
def test_cutting_a_document_does_not_change_its_tokens(
    tmp_path: Path, quiet: Progress, make: Callable[[], Tokenizer]
) -> None:
    tokenizer, chance, compared = make(), random.Random(0), 0
    parts = ["fox", "dogs", "it's", "x", "42", ";", "...", "_", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", "é"]
    for _ in range(200):
        text = "".join(chance.choices(parts, k=60)) + "end"
        (tmp_path / "file").write_bytes(text.encode())
        pieces = [piece.text for piece in read_pieces(survey([str(tmp_path / "file")], quiet), 40)]
        if all(a[-1].isalnum() and b[0] in " \n" for a, b in pairwise(pieces)):
            compared += len(pieces) - 1
            assert [id for piece in pieces for id in tokenizer.encode(piece).ids] == tokenizer.encode(text).ids
    assert compared > 100


def test_loading_refuses_what_is_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(Refused, match=r"data.tokenizer = .*tokenizer\.json: no such file; nearest legal: train"):
        load_tokenizer(path, 300)
    for content in (b"", b"{}", b"\xff\x00", b'{"model": 3}'):
        path.write_bytes(content)
        with pytest.raises(Refused, match=r"data.tokenizer = .*is not a tokenizers JSON file"):
            load_tokenizer(path, 300)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path, trained: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    trained.save(str(path))
    assert load_tokenizer(path, 300).get_vocab() == trained.get_vocab()
    assert load_tokenizer(path, 1000).get_vocab_size() == 300
    with pytest.raises(Refused, match=r"model.vocab = 299: .*ids up to 299; nearest legal: 300"):
        load_tokenizer(path, 299)


def test_ids_count_and_not_entries(tmp_path: Path, trained: Tokenizer) -> None:
    description = json.loads(trained.to_str())
    vocab = description["model"]["vocab"]
    unused = next(token for token, id in vocab.items() if id == 299)
    vocab[unused] = 7000
    path = tmp_path / "gaps.json"
    path.write_text(json.dumps(description))
    with pytest.raises(Refused, match="nearest legal: 7001"):
        load_tokenizer(path, 300)


def test_a_tokenizer_needs_a_separator_and_other_known_names_count(tmp_path: Path, trained: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.to_str().replace(SEPARATOR, "<strange>"))
    with pytest.raises(Refused, match=r"data.tokenizer = <strange>: .*nearest legal: <\|endoftext\|>"):
        load_tokenizer(path, 300)
    path.write_text(trained.to_str().replace(SEPARATOR, "<|end_of_text|>"))
    assert separator_id(load_tokenizer(path, 300)) == 0


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path, trained: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, 0)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    ids = load_tokenizer(path, 300).encode(WORDS, add_special_tokens=False).ids
    assert ids == trained.encode(WORDS).ids
