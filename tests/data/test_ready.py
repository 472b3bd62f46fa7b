"""Blends, and entries that are token files already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trigrid.data import ready
from trigrid.data.bpe import train_bpe
from trigrid.data.prepare import Prepared, TokenSet, prepare, prepare_folder
from trigrid.data.progress import Progress
from trigrid.data.tokens import TokenWriter, bin_path, open_tokens
from trigrid.errors import Problem, Refused
from trigrid.spec.job import Data

VOCAB = 400
MakeCorpus = Callable[..., Path]
TextsOf = Callable[[TokenSet, Path], list[str]]


def data_for(cache: Path, *entries: Path | str, fraction: float = 0.2, **other: object) -> Data:
    corpus = tuple(map(str, entries))
    return Data(corpus=corpus, validation_fraction=fraction, cache=str(cache), **other)  # type: ignore[arg-type]


def problem_of(data: Data, quiet: Progress, vocab: int = VOCAB) -> Problem:
    with pytest.raises(Refused) as refused:
        prepare(data, vocab, quiet)
    (problem,) = refused.value.problems
    return problem


def originals(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.txt"))]


def write_tokens(prefix: Path, lengths: list[int], vocab: int = 300) -> Path:
    with TokenWriter(prefix, vocab) as writer:
        for number, length in enumerate(lengths):
            writer.add([number % vocab] * length)
            writer.end_document()
    return prefix


@pytest.fixture
def folders(make_corpus: MakeCorpus) -> list[Path]:
    return [make_corpus(name=name, seed=seed) for name, seed in (("one", 0), ("two", 100))]


def test_with_weights_each_entry_has_its_own_files_and_all_train_one_tokenizer(
    folders: list[Path], tmp_path: Path, quiet: Progress, texts_of: TextsOf
) -> None:
    blend = prepare(data_for(tmp_path / "cache", *folders, weights=(0.7, 0.3)), VOCAB, quiet)
    single = prepare(data_for(tmp_path / "cache", *folders), VOCAB, quiet)
    assert (len(blend.train), len(single.train)) == (2, 1)
    assert blend.tokenizer is not None
    assert single.tokenizer is not None
    assert blend.tokenizer.read_bytes() == single.tokenizer.read_bytes()
    assert [one.entry for one in (*blend.train, *blend.validation)] == [0, 1, 0, 1]
    for one, held_out, folder in zip(blend.train, blend.validation, folders, strict=True):
        train, validation = texts_of(one, blend.tokenizer), texts_of(held_out, blend.tokenizer)
        assert sorted(train + validation) == sorted(originals(folder))
    joined = [np.asarray(open_tokens(one.prefix).tokens) for one in blend.train]
    assert np.array_equal(np.concatenate(joined), open_tokens(single.train[0].prefix).tokens)
    assert blend.hash != single.hash
    assert prepare(data_for(tmp_path / "cache", *folders, weights=(0.5, 0.5)), VOCAB, quiet).cached


def test_a_blend_may_have_an_entry_without_held_out_text_but_none_without_text(
    folders: list[Path], tmp_path: Path, quiet: Progress
) -> None:
    (tmp_path / "alone.txt").write_text(originals(folders[0])[0])
    entries = (tmp_path / "alone.txt", folders[1])
    prepared = prepare(data_for(tmp_path / "cache", *entries, weights=(0.5, 0.5)), VOCAB, quiet)
    assert [one.entry for one in prepared.train] == [0, 1]
    assert [one.entry for one in prepared.validation] == [1]
    problem = problem_of(data_for(tmp_path / "cache", *entries, fraction=0.99, weights=(0.5, 0.5)), quiet)
    assert "each corpus with a weight needs documents to train on" in problem.reason
    legal = float(str(problem.legal[0]))
    assert 0 < legal < 0.99
    prepare(data_for(tmp_path / "cache", *entries, fraction=legal, weights=(0.5, 0.5)), VOCAB, quiet)
    (tmp_path / "alone.txt").write_text("")
    problem = problem_of(data_for(tmp_path / "cache", *entries, weights=(0.5, 0.5)), quiet)
    assert str(problem) == f"data.corpus = {tmp_path / 'alone.txt'}: holds no text: 1 documents, all of them empty"


def folder_made(folder: Path, out: Path, tokenizer: Path, quiet: Progress, fraction: float = 0.2) -> Prepared:
    return prepare_folder(
        [str(folder)], str(tokenizer), out, vocab=0, validation_fraction=fraction, text_key="text", workers=1,
        progress=quiet,
    )  # fmt: skip


def test_a_prepared_folder_is_taken_as_it_lies(
    folders: list[Path], tmp_path: Path, quiet: Progress, tokenizer_file: Path
) -> None:
    made = folder_made(folders[0], tmp_path / "out", tokenizer_file, quiet)
    for tokenizer in ("train", str(tokenizer_file)):
        job = prepare(data_for(tmp_path / "cache", tmp_path / "out", tokenizer=tokenizer), VOCAB, quiet)
        train, validation = ([replace(one, name="") for one in part] for part in (made.train, made.validation))
        assert [replace(one, name="") for one in job.train] == train
        assert [replace(one, name="") for one in job.validation] == validation
        assert job.cached
    assert prepare(data_for(tmp_path / "cache", tmp_path / "out", fraction=0.0), VOCAB, quiet).validation == ()
    assert not (tmp_path / "cache").exists()
    problem = problem_of(data_for(tmp_path / "cache", tmp_path / "out"), quiet, VOCAB - 1)
    assert (problem.key, problem.legal) == ("model.vocab", (VOCAB,))
    file = bin_path(made.train[0].prefix)
    file.write_bytes(file.read_bytes()[:-2])
    assert problem_of(data_for(tmp_path / "cache", tmp_path / "out"), quiet).value == file


def test_a_folder_without_held_out_documents_is_split_at_its_end(
    folders: list[Path], tmp_path: Path, quiet: Progress, tokenizer_file: Path, texts_of: TextsOf
) -> None:
    folder_made(folders[0], tmp_path / "out", tokenizer_file, quiet, fraction=0.0)
    job = prepare(data_for(tmp_path / "cache", tmp_path / "out"), VOCAB, quiet)
    texts = [texts_of(one, tokenizer_file) for one in (*job.train, *job.validation)]
    assert texts[0] + texts[1] == originals(folders[0])
    assert 0.2 <= job.validation[0].tokens / (job.train[0].tokens + job.validation[0].tokens) < 0.25


@pytest.mark.parametrize(
    ("lengths", "fraction", "at"),
    [
        ([5, 5, 5, 5], 0.25, 3),
        ([5, 5, 5, 5], 0.26, 2),
        ([5, 5, 5, 5], 0.0001, 3),
        ([1, 1, 98], 0.5, 2),
        ([1, 99], 0.99, 1),
        ([5, 5, 0, 5, 0], 0.3, 3),
        ([3] * 1000, 0.1, 900),
    ],
)
def test_a_prefix_is_split_by_the_fewest_documents_at_its_end(
    tmp_path: Path, quiet: Progress, lengths: list[int], fraction: float, at: int
) -> None:
    prefix = write_tokens(tmp_path / "t", lengths)
    whole = prepare(data_for(tmp_path / "cache", prefix, fraction=0.0), VOCAB, quiet)
    split = prepare(data_for(tmp_path / "cache", prefix, fraction=fraction), VOCAB, quiet)
    common = {"prefix": prefix, "entry": 0, "name": str(prefix)}
    assert split.train == (
        TokenSet(documents=at, tokens=sum(lengths[:at]), first_document=0, stop_document=at, **common),
    )
    assert split.validation == (
        TokenSet(
            documents=len(lengths) - at,
            tokens=sum(lengths[at:]),
            first_document=at,
            stop_document=len(lengths),
            **common,
        ),
    )
    assert split.tokenizer is None
    assert (whole.train[0].documents, whole.train[0].tokens) == (len(lengths), sum(lengths))
    assert whole.hash != split.hash


def test_a_prefix_that_cannot_be_split_is_refused_with_a_fraction_that_can(tmp_path: Path, quiet: Progress) -> None:
    prefix = write_tokens(tmp_path / "t", [6, 1, 3])
    problem = problem_of(data_for(tmp_path / "cache", prefix, fraction=0.5), quiet)
    assert problem.key == "data.validation_fraction"
    assert problem.legal == (0.4, 0.0)
    assert prepare(data_for(tmp_path / "cache", prefix, fraction=0.4), VOCAB, quiet).train[0].documents == 1
    write_tokens(tmp_path / "one", [6])
    assert problem_of(data_for(tmp_path / "cache", tmp_path / "one", fraction=0.1), quiet).legal == (0.0,)


def test_the_hash_of_a_prefix_sees_another_content_and_not_the_place(
    tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "PROBE_BYTES", 16)
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write_tokens(tmp_path / name / "t", [200, 300])
    file = bin_path(tmp_path / "c" / "t")
    file.write_bytes(file.read_bytes()[:-2] + b"\7\0")
    hashes = [
        prepare(data_for(tmp_path / "cache", tmp_path / name / "t"), VOCAB, quiet).hash for name in ("a", "b", "c")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_text_and_tokens_together_keep_the_order_of_the_entries(
    folders: list[Path], tmp_path: Path, quiet: Progress, tokenizer_file: Path
) -> None:
    made = folder_made(folders[0], tmp_path / "out", tokenizer_file, quiet)
    prefix = write_tokens(tmp_path / "t", [50] * 50)
    entries = (prefix, folders[1], tmp_path / "out")
    for weights in ((), (0.2, 0.3, 0.5)):
        data = data_for(tmp_path / "cache", *entries, weights=weights, tokenizer=str(tokenizer_file))
        job = prepare(data, VOCAB, quiet)
        assert [one.entry for one in job.train] == [0, 1, 2]
        assert job.train[0].prefix == prefix
        assert job.train[2].prefix == made.train[0].prefix
        assert [one.entry for one in job.validation] == [0, 1, 2]


def test_tokens_of_another_tokenizer_are_refused(
    folders: list[Path], tmp_path: Path, quiet: Progress, tokenizer_file: Path
) -> None:
    folder_made(folders[0], tmp_path / "out", tokenizer_file, quiet)
    problem = problem_of(data_for(tmp_path / "cache", tmp_path / "out", folders[1]), quiet)
    assert (problem.key, problem.value) == ("data.tokenizer", "train")
    assert problem.legal == (str(tmp_path / "out" / "tokenizer.json"),)
    other = tmp_path / "other.json"
    train_bpe(iter(originals(folders[1])), VOCAB - 1, other)
    folder_made(folders[1], tmp_path / "out2", other, quiet)
    expected = f"data.corpus = {tmp_path / 'out'}: was made with another tokenizer than {other}; nearest legal: "
    data = data_for(tmp_path / "cache", tmp_path / "out", folders[1], tokenizer=str(other))
    assert str(problem_of(data, quiet)).startswith(expected)
    data = data_for(tmp_path / "cache", tmp_path / "out2", tmp_path / "out")
    assert problem_of(data, quiet).value == str(tmp_path / "out")


def test_a_folder_of_a_blend_needs_a_name(folders: list[Path], tmp_path: Path, quiet: Progress) -> None:
    blend = prepare(data_for(tmp_path / "cache", *folders, weights=(0.7, 0.3)), VOCAB, quiet)
    folder = blend.train[0].prefix.parent
    problem = problem_of(data_for(tmp_path / "other", folder), quiet)
    assert problem.legal == tuple(str(one.prefix) for one in blend.train)
    named = prepare(data_for(tmp_path / "other", blend.train[1].prefix, fraction=0.0), VOCAB, quiet)
    assert named.train[0].tokens == blend.train[1].tokens
    assert named.tokenizer == blend.tokenizer


def test_a_cached_corpus_serves_at_any_place_of_a_job(
    folders: list[Path], tmp_path: Path, tokenizer_file: Path, quiet: Progress
) -> None:
    """The folder does not remember where in the corpus its text stood when it was made."""
    tokens = write_tokens(tmp_path / "tokens", [50] * 30)

    def data(*entries: Path | str, weights: tuple[float, ...] = ()) -> Data:
        return data_for(tmp_path / "cache", *entries, weights=weights, tokenizer=str(tokenizer_file))

    behind = prepare(data(tokens, folders[0], weights=(3, 1)), VOCAB, quiet)
    before = prepare(data(folders[0], tokens, weights=(1, 3)), VOCAB, quiet)
    alone = prepare(data(folders[0]), VOCAB, quiet)
    assert (before.cached, alone.cached) == (True, True)
    assert [(one.entry, one.name) for one in behind.train] == [(0, str(tokens)), (1, str(folders[0]))]
    assert [(one.entry, one.name) for one in before.train] == [(0, str(folders[0])), (1, str(tokens))]
    assert [one.entry for one in alone.train] == [0]
    assert len({behind.hash, before.hash, alone.hash}) == 3


def test_a_damaged_folder_of_the_cache_is_to_be_deleted(folders: list[Path], tmp_path: Path, quiet: Progress) -> None:
    made = prepare(data_for(tmp_path / "cache", folders[0]), VOCAB, quiet)
    folder = made.train[0].prefix.parent
    (folder / "train.bin").write_bytes(b"1234")
    problem = problem_of(data_for(tmp_path / "cache", folders[0]), quiet)
    assert problem.reason.startswith("is truncated: 4 bytes")
    assert problem.reason.endswith(f"; delete {folder}, and it is prepared again")
    (folder / "data.json").unlink()
    problem = problem_of(data_for(tmp_path / "cache", folders[0]), quiet)
    assert (problem.value, problem.reason) == (folder, "is in the way, and is not what trigrid prepares: delete it")


def test_tokens_inside_a_corpus_are_no_text_of_it(folders: list[Path], tmp_path: Path, quiet: Progress) -> None:
    """As where the cache or `--out` lies in the folder that is prepared."""
    for cached in (False, True):
        assert prepare(data_for(folders[0] / "cache", folders[0]), VOCAB, quiet).cached == cached
