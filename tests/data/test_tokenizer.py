from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from trigrid.data.bpe import SEPARATOR, JsonTokenizer, train_bpe
from trigrid.data.pieces import Block, cut_into_pieces, may_cut
from trigrid.data.ranks import LLAMA3
from trigrid.data.tokenizer import check_fits, load_tokenizer
from trigrid.errors import Refused

WORDS = "the quick brown foxes jumped over 42 lazy dogs; it's naïve, isn't it?\n\n\tdef f(x):\n        return x+1  \r\n"


def trained(path: Path, vocab: int = 300, text: str = WORDS) -> Path:
    train_bpe(iter([text] * 3), vocab, path)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> JsonTokenizer:
    return JsonTokenizer(path, 2)


def test_training_gives_exactly_the_vocabulary_and_the_same_twice(path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    assert sorted(tokenizer.get_vocab().values()) == list(range(300))
    assert load_tokenizer(path, 1).separator == 0
    assert trained(tmp_path / "again.json").read_bytes() == path.read_bytes()


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives(tokenizer: JsonTokenizer, text: str) -> None:
    for whole in (text, text + SEPARATOR + text):
        (ids,) = tokenizer.encode_batch([whole])
        assert tokenizer.separator not in ids
        assert tokenizer.decode(ids.tolist()) == whole


def test_a_corpus_too_small_says_how_far_it_reaches(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        train_bpe(iter([WORDS]), 5000, tmp_path / "t")
    (problem,) = refused.value.problems
    (reachable,) = problem.legal
    assert (problem.key, problem.value) == ("model.vocab", 5000)
    assert f"{reachable} entries" in problem.reason
    assert not (tmp_path / "t").exists()
    assert load_tokenizer(trained(tmp_path / "t", int(str(reachable))), 1).vocab == reachable


def test_fewer_entries_than_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"model.vocab = 256: .*nearest legal: 257"):
        trained(tmp_path / "t", 256)
    assert load_tokenizer(trained(tmp_path / "t", 257), 1).vocab == 257


def test_errors_of_the_text_pass_through_training(tmp_path: Path) -> None:
    def texts() -> object:
        yield WORDS
        raise Refused([])

    with pytest.raises(Refused):
        train_bpe(texts(), 300, tmp_path / "t")  # type: ignore[arg-type]


def bpe_with(path: Path, pre_tokenizer: object, normalizer: object = None) -> Path:
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    tokenizer.save(str(path))
    return path


def split_by(pattern: str) -> object:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


CUTTABLE = [
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    split_by(LLAMA3),
    split_by(r"\w+|[^\w\s]+|\s+"),
    pre_tokenizers.WhitespaceSplit(),
    pre_tokenizers.BertPreTokenizer(),
]
WHOLE = [
    None,
    pre_tokenizers.Metaspace(),
    pre_tokenizers.Metaspace(prepend_scheme="never"),
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    split_by(r"[^\n]+|\n"),
    split_by(r"\w+ \w+|\s+"),
    pre_tokenizers.Split(" ", "merged_with_previous"),
]


@pytest.mark.parametrize("pre_tokenizer", CUTTABLE, ids=range(len(CUTTABLE)))
def test_cutting_a_document_does_not_change_its_tokens(tmp_path: Path, pre_tokenizer: object) -> None:
    tokenizer, chance, compared = load_tokenizer(bpe_with(tmp_path / "t.json", pre_tokenizer), 1), random.Random(0), 0
    assert tokenizer.cuttable
    parts = [
        "fox",
        "dogs",
        "it's",
        "x",
        "42",
        ";",
        "...",
        "_",
        " ",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "é",
        "日",
        "。\n",
    ]
    for _ in range(200):
        text = "".join(chance.choices(parts, k=60)) + "end"
        pieces = [piece.text for piece in cut_into_pieces([Block(text, True, "")], True, 40, 1000)]
        ends = [sum(map(len, pieces[:number])) for number in range(1, len(pieces))]
        assert all(may_cut(text, end) for end in ends)
        compared += len(ends)
        found = [id for ids in tokenizer.encode_batch(pieces) for id in ids.tolist()]
        assert found == tokenizer.encode_batch([text])[0].tolist()
    assert compared > 100


@pytest.mark.parametrize("pre_tokenizer", WHOLE, ids=range(len(WHOLE)))
def test_a_tokenizer_whose_words_span_such_places_takes_documents_whole(tmp_path: Path, pre_tokenizer: object) -> None:
    assert not load_tokenizer(bpe_with(tmp_path / "t.json", pre_tokenizer), 1).cuttable


def test_a_normalizer_or_an_added_token_that_looks_further_forbids_cutting(tmp_path: Path) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert load_tokenizer(bpe_with(tmp_path / "t", byte_level, normalizers.NFC()), 1).cuttable
    for normalizer in (normalizers.Prepend("▁"), normalizers.Strip()):
        assert not load_tokenizer(bpe_with(tmp_path / "t", byte_level, normalizer), 1).cuttable
    gemma = pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁")
    assert not load_tokenizer(bpe_with(tmp_path / "t", *gemma), 1).cuttable
    for token, cuttable in (
        (AddedToken("    "), True),
        (AddedToken("New York"), False),
        (AddedToken("x", lstrip=True), False),
    ):
        tokenizer = Tokenizer.from_file(str(bpe_with(tmp_path / "t", byte_level)))
        tokenizer.add_tokens([token])
        tokenizer.save(str(tmp_path / "t"))
        assert load_tokenizer(tmp_path / "t", 1).cuttable is cuttable


def test_pieces_of_a_cut_text_meet_where_the_words_do() -> None:
    text = "fox jumps\nover。\n日本 \nx"
    places = [place for place in range(1, len(text)) if may_cut(text, place)]
    assert [text[a:b] for a, b in pairwise([0, *places, len(text)])] == [
        "fox",
        " jumps",
        "\n",
        "over。\n",
        "日本",
        " \nx",
    ]


def test_loading_refuses_what_is_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(Refused, match=r"data.tokenizer = .*tokenizer\.json: no such file; nearest legal: train"):
        load_tokenizer(path, 1)
    for content in (b"", b"{}", b"\xff\x00", b'{"model": 3}'):
        path.write_bytes(content)
        with pytest.raises(Refused, match=r"data.tokenizer = .*is neither a tokenizers JSON file nor"):
            load_tokenizer(path, 1)


def test_a_tokenizer_larger_than_the_model_is_refused(path: Path) -> None:
    check_fits(load_tokenizer(path, 1), path, 300)
    with pytest.raises(Refused, match=r"model.vocab = 299: .*ids up to 299; nearest legal: 300"):
        check_fits(load_tokenizer(path, 1), path, 299)


def test_ids_count_and_not_entries(tmp_path: Path, path: Path) -> None:
    description = json.loads(path.read_text())
    vocab = description["model"]["vocab"]
    unused = next(token for token, id in vocab.items() if id == 299)
    vocab[unused] = 7000
    (tmp_path / "gaps.json").write_text(json.dumps(description))
    assert load_tokenizer(tmp_path / "gaps.json", 1).vocab == 7001


def test_a_tokenizer_needs_a_separator_and_other_known_names_count(tmp_path: Path, path: Path) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_text(path.read_text().replace(SEPARATOR, "<strange>"))
    with pytest.raises(Refused, match=r"data.tokenizer = <strange>: .*nearest legal: <\|endoftext\|>"):
        load_tokenizer(other, 1)
    other.write_text(path.read_text().replace(SEPARATOR, "<|end_of_text|>"))
    assert load_tokenizer(other, 1).separator == 0


def test_truncation_padding_and_added_tokens_of_the_file_are_switched_off(tmp_path: Path, path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    expected = tokenizer.encode(WORDS).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, 0)])
    tokenizer.save(str(tmp_path / "t"))
    assert load_tokenizer(tmp_path / "t", 1).encode_batch([WORDS])[0].tolist() == expected
