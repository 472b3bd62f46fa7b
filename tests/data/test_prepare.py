from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from trigrid.data import corpus as corpus_module
from trigrid.data.prepare import Prepared, TokenSet, prepare
from trigrid.data.progress import Progress
from trigrid.data.tokenizer import SEPARATOR
from trigrid.data.tokens import bin_path, idx_path, open_tokens
from trigrid.errors import Problem, Refused
from trigrid.spec.job import Data

VOCAB = 400
MakeCorpus = Callable[..., Path]


def texts_of(tokens: TokenSet, tokenizer: Tokenizer) -> list[str]:
    """The documents of a token file, decoded; each must end with the one separator that it has."""
    file = open_tokens(tokens.prefix)
    separator = tokenizer.token_to_id(SEPARATOR)
    stream = file.tokens.tolist()
    assert stream[-1] == separator
    assert len(stream) == tokens.tokens
    documents = [list(run) for key, run in itertools.groupby(stream, lambda id: id == separator) if not key]
    assert len(documents) == tokens.documents == file.document_count
    assert [len(document) + 1 for document in documents] == file.lengths.tolist()
    return [tokenizer.decode(document, skip_special_tokens=False) for document in documents]


def texts(prepared: Prepared) -> tuple[list[str], list[str]]:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer))
    validation = texts_of(prepared.validation, tokenizer) if prepared.validation else []
    return texts_of(prepared.train, tokenizer), validation


def data_for(folder: Path, fraction: float = 0.2, **other: str) -> Data:
    cache = str(folder.parent / "cache")
    return Data(**{"corpus": (str(folder),), "validation_fraction": fraction, "cache": cache, **other})


def problem_of(data: Data, quiet: Progress, vocab: int = VOCAB) -> Problem:
    with pytest.raises(Refused) as refused:
        prepare(data, vocab, quiet)
    (problem,) = refused.value.problems
    return problem


@pytest.fixture
def folder(make_corpus: MakeCorpus) -> Path:
    return make_corpus()


def test_every_document_comes_back_whole_in_order_and_once(
    folder: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "BLOCK_BYTES", 100)
    monkeypatch.setattr(corpus_module.read_pieces, "__defaults__", (64,))
    monkeypatch.setattr("trigrid.data.prepare.CHUNK_CHARS_PER_CORE", 500)
    prepared = prepare(data_for(folder), VOCAB, quiet)
    train, validation = texts(prepared)
    files = sorted(folder.rglob("*.txt"), key=lambda path: path.as_posix())
    originals = [path.read_text(encoding="utf-8") for path in files]
    assert sorted(train + validation) == sorted(originals)
    assert train == [text for text in originals if text not in validation]
    assert validation == [text for text in originals if text not in train]
    assert validation
    assert prepared.validation is not None
    assert prepared.train.documents + prepared.validation.documents == len(files)


def test_a_second_call_finds_the_first_ones_files(folder: Path, quiet: Progress) -> None:
    first = prepare(data_for(folder), VOCAB, quiet)
    before = {path: path.stat().st_mtime_ns for path in first.tokenizer.parent.iterdir()}
    again = prepare(data_for(folder), VOCAB, quiet)
    assert (first.cached, again.cached) == (False, True)
    assert again == dataclasses.replace(first, cached=True)
    assert {path: path.stat().st_mtime_ns for path in first.tokenizer.parent.iterdir()} == before
    assert first.tokenizer.parent.name == first.hash


def test_the_hash_is_of_what_decides_the_content(folder: Path, quiet: Progress, tmp_path: Path) -> None:
    first = prepare(data_for(folder), VOCAB, quiet)
    loaded = data_for(folder, tokenizer=str(first.tokenizer))
    other = [
        prepare(data_for(folder), VOCAB - 1, quiet),
        prepare(data_for(folder, 0.5), VOCAB, quiet),
        prepare(loaded, VOCAB, quiet),
    ]
    file = next(folder.rglob("*.txt"))
    content = file.read_bytes()
    file.write_bytes(content.swapcase())
    other.append(prepare(data_for(folder), VOCAB, quiet))
    assert len({first.hash, *(prepared.hash for prepared in other)}) == 5
    file.write_bytes(content)
    moved = folder.rename(tmp_path / "elsewhere")
    assert prepare(data_for(moved), VOCAB, quiet) == dataclasses.replace(first, cached=True)


def test_the_same_corpus_gives_the_same_bytes(folder: Path, quiet: Progress, tmp_path: Path) -> None:
    contents = []
    for cache in ("one", "two"):
        prepared = prepare(data_for(folder, cache=str(tmp_path / cache)), VOCAB, quiet)
        contents.append({path.name: path.read_bytes() for path in prepared.tokenizer.parent.iterdir()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {"tokenizer.json", "train.bin", "train.idx", "validation.bin", "validation.idx"}


def test_a_document_stays_on_its_side_whatever_else_there_is(folder: Path, quiet: Progress) -> None:
    train, validation = texts(prepare(data_for(folder), VOCAB, quiet))
    for number in range(5):
        (folder / f"0new{number}.txt").write_text(f"one more {number} " * 20)
    more_train, more_validation = texts(prepare(data_for(folder), VOCAB, quiet))
    assert set(train) < set(more_train) | set(more_validation)
    assert not set(train) & set(more_validation)
    assert not set(validation) & set(more_train)
    larger_train, _ = texts(prepare(data_for(folder, 0.5), VOCAB, quiet))
    assert not set(validation) & set(larger_train)


def test_the_validation_share_is_about_the_fraction(make_corpus: MakeCorpus, quiet: Progress) -> None:
    prepared = prepare(data_for(make_corpus(files=600, words=16), 0.3), VOCAB, quiet)
    assert prepared.validation is not None
    assert 0.25 < prepared.validation.documents / 600 < 0.35


def test_no_validation_set_where_none_is_asked_for(folder: Path, quiet: Progress) -> None:
    for cached in (False, True):
        prepared = prepare(data_for(folder, 0.0), VOCAB, quiet)
        assert prepared.validation is None
        assert prepared.cached is cached
        assert prepared.train.documents == 30


def test_the_validation_set_does_not_train_the_tokenizer(folder: Path, quiet: Progress) -> None:
    train, validation = texts(prepare(data_for(folder), VOCAB, quiet))
    held_out = next(path for path in folder.rglob("*.txt") if path.read_text(encoding="utf-8") == validation[0])
    before = prepare(data_for(folder), VOCAB, quiet).tokenizer.read_bytes()
    assert len(validation) > 1
    held_out.unlink()
    after = prepare(data_for(folder), VOCAB, quiet)
    assert not after.cached
    assert after.tokenizer.read_bytes() == before
    assert len(train) == after.train.documents


def test_a_fraction_that_leaves_a_set_empty_is_refused_with_one_that_does_not(
    make_corpus: MakeCorpus, quiet: Progress
) -> None:
    folder = make_corpus(files=3)
    for fraction, chosen in ((0.0001, 0), (0.9999, 3)):
        problem = problem_of(data_for(folder, fraction), quiet)
        assert (problem.key, problem.value) == ("data.validation_fraction", fraction)
        assert f"puts {chosen} of 3 documents" in problem.reason
        assert len(problem.legal) == 2
        for legal in problem.legal:
            prepare(data_for(folder, float(str(legal))), VOCAB, quiet)
    alone = make_corpus(files=1, name="alone", words=3000)
    assert problem_of(data_for(alone, 0.02), quiet).legal == (0.0,)
    assert prepare(data_for(alone, 0.0), VOCAB, quiet).train.documents == 1


@pytest.mark.parametrize(("fraction", "nearest"), [(-0.1, 0.0), (1.0, 0.5), (float("nan"), 0.0)])
def test_a_fraction_out_of_range_is_refused(folder: Path, quiet: Progress, fraction: float, nearest: float) -> None:
    assert problem_of(data_for(folder, fraction), quiet).legal == (nearest,)


def test_a_text_that_spells_the_separator_does_not_end_its_document(folder: Path, quiet: Progress) -> None:
    (folder / "tricky.txt").write_text(f"before{SEPARATOR}after")
    train, validation = texts(prepare(data_for(folder), VOCAB, quiet))
    assert f"before{SEPARATOR}after" in train + validation


def test_a_given_tokenizer_is_used_as_it_is_but_adds_no_tokens(folder: Path, quiet: Progress, tmp_path: Path) -> None:
    first = prepare(data_for(folder), VOCAB, quiet)
    tokenizer = Tokenizer.from_file(str(first.tokenizer))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, 0)])
    tokenizer.enable_truncation(8)
    path = tmp_path / "given.json"
    tokenizer.save(str(path))
    second = prepare(data_for(folder, tokenizer=str(path)), 70_000, quiet)
    assert second.tokenizer.read_bytes() == path.read_bytes()
    assert np.array_equal(open_tokens(second.train.prefix).tokens, open_tokens(first.train.prefix).tokens)
    assert open_tokens(second.train.prefix).tokens.dtype == np.int32
    assert problem_of(data_for(folder, tokenizer=str(path)), quiet, VOCAB - 1).key == "model.vocab"


def test_mistakes_leave_nothing_behind(folder: Path, quiet: Progress) -> None:
    cache = folder.parent / "cache"
    problem = problem_of(data_for(folder), quiet, 60_000)
    assert problem.key == "model.vocab"
    assert problem_of(data_for(folder, tokenizer="nowhere.json"), quiet).key == "data.tokenizer"
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    assert "at byte 0" in problem_of(data_for(folder), quiet).reason
    assert [path for path in cache.iterdir() if not path.name.endswith(".lock")] == []
    (folder / "latin.txt").unlink()
    assert prepare(data_for(folder), int(str(problem.legal[0])), quiet).cached is False


@pytest.mark.parametrize("stage", ["training", "tokenising"])
def test_a_killed_preparation_is_never_taken_for_a_whole_one(
    folder: Path, quiet: Progress, tmp_path: Path, stage: str
) -> None:
    program = (
        "import os, signal, sys\n"
        "from trigrid.data.prepare import prepare\n"
        "from trigrid.spec.job import Data\n"
        "def progress(stage, done, total):\n"
        "    if stage.startswith(sys.argv[3]) and (done or sys.argv[3] == 'training'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "data = Data(corpus=(sys.argv[1],), validation_fraction=0.2, cache=sys.argv[2])\n"
        f"prepare(data, {VOCAB}, progress)\n"
    )
    data = data_for(folder)
    command = [sys.executable, "-c", program, str(folder), data.cache, stage]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert list(Path(data.cache).glob(".*.partial"))
    after_kill = prepare(data, VOCAB, quiet)
    clean = prepare(dataclasses.replace(data, cache=str(tmp_path / "clean")), VOCAB, quiet)
    assert after_kill.cached is False
    for path in clean.tokenizer.parent.iterdir():
        assert (after_kill.tokenizer.parent / path.name).read_bytes() == path.read_bytes()


def test_damage_in_the_cache_is_named(folder: Path, quiet: Progress) -> None:
    prepared = prepare(data_for(folder), VOCAB, quiet)
    file = bin_path(prepared.train.prefix)
    file.write_bytes(file.read_bytes()[:-2])
    problem = problem_of(data_for(folder), quiet)
    assert (problem.value, problem.key) == (file, "token file")
    idx_path(prepared.train.prefix).unlink()
    assert "cannot be read" in problem_of(data_for(folder), quiet).reason


def test_a_file_of_several_pieces_is_one_document(tmp_path: Path, quiet: Progress) -> None:
    chance = random.Random(1)
    text = "\n".join(hashlib.sha256(chance.randbytes(4)).hexdigest() for _ in range(5000))
    assert len(text) > 4 * corpus_module.PIECE_CHARS
    (tmp_path / "big.txt").write_text(text)
    prepared = prepare(data_for(tmp_path / "big.txt", 0.0), VOCAB, quiet)
    assert texts(prepared) == ([text], [])


def test_the_standard_library_takes_well_under_a_minute_and_is_never_silent(tmp_path: Path) -> None:
    """In CPU time of all threads, which other processes on the machine do not stretch."""
    moments: dict[str, list[tuple[float, int, int]]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        moments.setdefault(stage.split()[0], []).append((time.process_time(), done, total))

    begin_s = time.process_time()
    prepared = prepare(Data(cache=str(tmp_path)), 4096, progress)
    end_s = time.process_time()
    assert end_s - begin_s < 60
    assert prepared.train.tokens > 2_000_000
    assert prepared.validation is not None
    assert list(moments) == ["listing", "reading", "training", "tokenising"]
    heard = [begin_s, *(moment for stage in moments.values() for moment, _, _ in stage), end_s]
    assert max(b - a for a, b in itertools.pairwise(heard)) < 2 * (os.cpu_count() or 1)
    for stage in ("reading", "training", "tokenising"):
        done = [done for _, done, _ in moments[stage]]
        assert done == sorted(done)
        assert done[-1] == moments[stage][-1][2]
