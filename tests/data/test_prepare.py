"""What a job gets: the cache, the split, the tokenizer, and that nothing half-made is ever found."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
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

from trigrid.data import documents, pieces
from trigrid.data.bpe import SEPARATOR
from trigrid.data.prepare import Prepared, TokenSet, load, prepare, save
from trigrid.data.progress import Progress
from trigrid.data.tokens import bin_path, idx_path, open_tokens
from trigrid.errors import Problem, Refused
from trigrid.spec.job import Data

VOCAB = 400
MakeCorpus = Callable[..., Path]
Texts = Callable[[Prepared], tuple[list[str], list[str]]]


@pytest.fixture
def texts(texts_of: Callable[[TokenSet, Path], list[str]]) -> Texts:
    def both(prepared: Prepared) -> tuple[list[str], list[str]]:
        assert len(prepared.train) == 1
        assert prepared.tokenizer is not None
        validation = [text for one in prepared.validation for text in texts_of(one, prepared.tokenizer)]
        return texts_of(prepared.train[0], prepared.tokenizer), validation

    return both


def folder_of(prepared: Prepared) -> Path:
    return prepared.train[0].prefix.parent


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
    folder: Path, quiet: Progress, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", 100)
    monkeypatch.setattr(pieces.cut_into_pieces, "__defaults__", (64, 128))
    monkeypatch.setattr("trigrid.data.tokenise.CHUNK_CHARS", 500)
    monkeypatch.setattr("trigrid.data.shards.SHARD_BYTES", 5000)
    prepared = prepare(data_for(folder), VOCAB, quiet)
    train, validation = texts(prepared)
    files = sorted(folder.rglob("*.txt"), key=lambda path: path.as_posix())
    originals = [path.read_text(encoding="utf-8") for path in files]
    assert sorted(train + validation) == sorted(originals)
    assert train == [text for text in originals if text not in validation]
    assert validation == [text for text in originals if text not in train]
    assert validation
    assert prepared.train[0].documents + prepared.validation[0].documents == len(files)


def test_a_second_call_finds_the_first_ones_files_without_reading_the_corpus(
    folder: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(data_for(folder), VOCAB, quiet)
    before = {path: path.stat().st_mtime_ns for path in folder_of(first).iterdir()}
    monkeypatch.setattr(documents, "read_blocks", lambda *args: pytest.fail("read again"))
    stages: list[str] = []
    again = prepare(data_for(folder), VOCAB, lambda stage, done, total: stages.append(stage))
    assert (first.cached, again.cached) == (False, True)
    assert again == dataclasses.replace(first, cached=True)
    assert {path: path.stat().st_mtime_ns for path in folder_of(first).iterdir()} == before
    assert set(stages) == {"listing the corpus (files)"}


def test_prepared_survives_as_json(folder: Path, quiet: Progress, tmp_path: Path) -> None:
    prepared = prepare(data_for(folder), VOCAB, quiet)
    save(prepared, tmp_path / "data.json")
    assert load(tmp_path / "data.json") == prepared


def test_whatever_decides_the_files_makes_new_ones(folder: Path, quiet: Progress, tmp_path: Path) -> None:
    first = prepare(data_for(folder), VOCAB, quiet)
    loaded = data_for(folder, tokenizer=str(first.tokenizer))
    other = [
        prepare(data_for(folder), VOCAB - 1, quiet),
        prepare(data_for(folder, 0.5), VOCAB, quiet),
        prepare(loaded, VOCAB, quiet),
    ]
    assert other[-1].hash == first.hash
    file = next(folder.rglob("*.txt"))
    content, status = file.read_bytes(), file.stat()
    file.write_bytes(content.swapcase())
    other.append(prepare(data_for(folder), VOCAB, quiet))
    assert len({folder_of(prepared) for prepared in (first, *other)}) == 5
    assert len({prepared.hash for prepared in (first, *other)}) == 4
    # The same size and the same time of change, which anybody can set, do not make it the same file.
    file.write_bytes(content.swapcase().replace(b"a", b"e"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not prepare(data_for(folder), VOCAB, quiet).cached


def test_a_corpus_that_is_moved_stays_the_same(folder: Path, quiet: Progress, tmp_path: Path) -> None:
    first = prepare(data_for(folder), VOCAB, quiet)
    loaded = data_for(folder, tokenizer=str(first.tokenizer))
    prepare(loaded, VOCAB, quiet)
    moved = folder.rename(tmp_path / "elsewhere")
    found = prepare(data_for(moved), VOCAB, quiet)
    assert (found.cached, found.hash, folder_of(found)) == (True, first.hash, folder_of(first))
    # With a tokenizer of its own a corpus does not depend on the model.
    assert prepare(dataclasses.replace(loaded, corpus=(str(moved),)), VOCAB + 9, quiet).cached


def test_the_hash_is_of_the_content_and_the_record_tells_the_rest(
    folder: Path, quiet: Progress, tmp_path: Path
) -> None:
    first = prepare(data_for(folder), VOCAB, quiet)
    for file in folder.rglob("*.txt"):
        os.utime(file)
    second = prepare(data_for(folder, cache=str(tmp_path / "two")), VOCAB, quiet)
    assert (first.hash, folder_of(first).name) != (second.hash, folder_of(second).name)
    assert first.hash == second.hash
    names = {"tokenizer.json", "train.bin", "train.idx", "validation.bin", "validation.idx"}
    contents = [{name: (folder_of(one) / name).read_bytes() for name in names} for one in (first, second)]
    assert contents[0] == contents[1]
    assert {path.name for path in folder_of(first).iterdir()} == {*names, "data.json"}
    record = json.loads((folder_of(first) / "data.json").read_bytes())
    (recorded,) = record["sets"]
    content = contents[0]["train.bin"] + contents[0]["train.idx"]
    assert recorded["train"] == {
        "name": "train",
        "documents": first.train[0].documents,
        "tokens": first.train[0].tokens,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    size = sum(path.stat().st_size for path in folder.rglob("*.txt"))
    assert record["inputs"] == [{"entry": str(folder), "sources": 30, "bytes": size}]
    assert record["tokenizer_sha256"] == hashlib.sha256(contents[0]["tokenizer.json"]).hexdigest()
    assert (record["vocab"], record["separator"], record["dtype"]) == (VOCAB, 0, "uint16")


def test_a_document_stays_on_its_side_whatever_else_there_is(folder: Path, quiet: Progress, texts: Texts) -> None:
    train, validation = texts(prepare(data_for(folder), VOCAB, quiet))
    for number in range(5):
        (folder / f"0new{number}.txt").write_text(f"one more {number} " * 20)
    more_train, more_validation = texts(prepare(data_for(folder), VOCAB, quiet))
    assert set(train) < set(more_train) | set(more_validation)
    assert not set(train) & set(more_validation)
    assert not set(validation) & set(more_train)
    larger_train, _ = texts(prepare(data_for(folder, 0.5), VOCAB, quiet))
    assert not set(validation) & set(larger_train)


def test_the_rule_of_the_split(folder: Path, quiet: Progress, texts: Texts) -> None:
    _, validation = texts(prepare(data_for(folder), VOCAB, quiet))
    texts_below = [
        path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.txt"))
        if int(hashlib.sha256(path.read_bytes()).hexdigest()[:13], 16) / 16**13 < 0.2
    ]
    assert validation == texts_below


def test_the_same_text_is_split_alike_from_files_and_from_lines(
    folder: Path, quiet: Progress, texts: Texts, tokenizer_file: Path, tmp_path: Path
) -> None:
    originals = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.txt"))]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in ["", *originals]))
    given = str(tokenizer_file)
    from_files = prepare(data_for(folder, tokenizer=given), VOCAB, quiet)
    from_lines = prepare(data_for(lines, tokenizer=given), VOCAB, quiet)
    assert from_lines.hash == from_files.hash
    assert texts(from_lines) == texts(from_files)
    assert json.loads((folder_of(from_lines) / "data.json").read_bytes())["empty_documents"] == 1
    assert problem_of(data_for(lines, tokenizer=given, text_key="body"), quiet).legal == ("id", "text")


def test_the_validation_share_is_about_the_fraction(make_corpus: MakeCorpus, quiet: Progress) -> None:
    prepared = prepare(data_for(make_corpus(files=600, words=16), 0.3), VOCAB, quiet)
    assert 0.25 < prepared.validation[0].documents / 600 < 0.35


def test_no_validation_set_where_none_is_asked_for(folder: Path, quiet: Progress) -> None:
    for cached in (False, True):
        prepared = prepare(data_for(folder, 0.0), VOCAB, quiet)
        assert prepared.validation == ()
        assert prepared.cached is cached
        assert prepared.train[0].documents == 30


def test_the_validation_set_does_not_train_the_tokenizer(folder: Path, quiet: Progress, texts: Texts) -> None:
    prepared = prepare(data_for(folder), VOCAB, quiet)
    train, validation = texts(prepared)
    held_out = next(path for path in folder.rglob("*.txt") if path.read_text(encoding="utf-8") == validation[0])
    assert len(validation) > 1
    held_out.unlink()
    after = prepare(data_for(folder), VOCAB, quiet)
    assert not after.cached
    assert prepared.tokenizer is not None
    assert after.tokenizer is not None
    assert after.tokenizer.read_bytes() == prepared.tokenizer.read_bytes()
    assert len(train) == after.train[0].documents


def test_a_tokenizer_of_a_large_corpus_is_trained_on_an_even_sample(
    folder: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pieces.cut_into_pieces, "__defaults__", (200, 400))
    read: dict[int, list[str]] = {}
    train_bpe = "trigrid.data.training.train_bpe"
    size = sum(path.stat().st_size for path in folder.rglob("*.txt"))
    for share in (2, 4):
        monkeypatch.setattr("trigrid.data.training.SAMPLE_BYTES", size // share)
        monkeypatch.setattr(train_bpe, lambda texts, vocab, path, at=share: read.setdefault(at, []).extend(texts))
        said: list[tuple[str, int, int]] = []
        with pytest.raises(Refused):
            prepare(data_for(folder, 0.0), VOCAB, lambda *seen, to=said: to.append(seen))
        stage = f"training the tokenizer on {100 / share:.1f}% of the corpus (bytes read)"
        assert stage in {stage for stage, _, _ in said}
        assert 0.7 < sum(len(text.encode()) for text in read[share]) * share / size < 1.3
    assert set(read[4]) < set(read[2])


def test_a_fraction_that_leaves_a_set_empty_is_refused_with_one_that_does_not(
    make_corpus: MakeCorpus, quiet: Progress, tokenizer_file: Path
) -> None:
    folder = make_corpus(files=3)
    for tokenizer in ("train", str(tokenizer_file)):
        for fraction, chosen in ((0.0001, 0), (0.9999, 3)):
            problem = problem_of(data_for(folder, fraction, tokenizer=tokenizer), quiet)
            assert (problem.key, problem.value) == ("data.validation_fraction", fraction)
            assert f"puts {chosen} of 3 documents" in problem.reason
            assert len(problem.legal) == 2
            for legal in problem.legal:
                prepare(data_for(folder, float(str(legal)), tokenizer=tokenizer), VOCAB, quiet)
    alone = make_corpus(files=1, name="alone", words=3000)
    assert problem_of(data_for(alone, 0.02), quiet).legal == (0.0,)
    assert prepare(data_for(alone, 0.0), VOCAB, quiet).train[0].documents == 1


@pytest.mark.parametrize(("fraction", "nearest"), [(-0.1, 0.0), (1.0, 0.5), (float("nan"), 0.0)])
def test_a_fraction_out_of_range_is_refused(folder: Path, quiet: Progress, fraction: float, nearest: float) -> None:
    assert problem_of(data_for(folder, fraction), quiet).legal == (nearest,)


def test_a_text_that_spells_the_separator_does_not_end_its_document(
    folder: Path, quiet: Progress, texts: Texts
) -> None:
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
    assert second.tokenizer is not None
    assert second.tokenizer.read_bytes() == path.read_bytes()
    assert np.array_equal(open_tokens(second.train[0].prefix).tokens, open_tokens(first.train[0].prefix).tokens)
    assert problem_of(data_for(folder, tokenizer=str(path)), quiet, VOCAB - 1).key == "model.vocab"


def test_empty_files_are_no_documents_and_a_corpus_of_them_is_refused(
    tmp_path: Path, quiet: Progress, tokenizer_file: Path
) -> None:
    (tmp_path / "c").mkdir()
    for name in ("a", "b"):
        (tmp_path / "c" / name).touch()
    for tokenizer in ("train", str(tokenizer_file)):
        for fraction in (0.0, 0.5):
            problem = problem_of(data_for(tmp_path / "c", fraction, tokenizer=tokenizer), quiet)
            assert str(problem) == f"data.corpus = {tmp_path / 'c'}: holds no text: 2 documents, all of them empty"
    (tmp_path / "c" / "full").write_text("x")
    prepared = prepare(data_for(tmp_path / "c", 0.0, tokenizer=str(tokenizer_file)), VOCAB, quiet)
    assert prepared.train[0].documents == 1
    assert json.loads((folder_of(prepared) / "data.json").read_bytes())["empty_documents"] == 2


def test_mistakes_leave_nothing_behind(folder: Path, quiet: Progress) -> None:
    cache = folder.parent / "cache"
    problem = problem_of(data_for(folder), quiet, 60_000)
    assert problem.key == "model.vocab"
    assert problem_of(data_for(folder, tokenizer="nowhere.json"), quiet).key == "data.tokenizer"
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    assert "at byte 0" in problem_of(data_for(folder), quiet).reason
    assert list(cache.iterdir()) == []
    (folder / "latin.txt").unlink()
    assert prepare(data_for(folder), int(str(problem.legal[0])), quiet).cached is False


def test_a_file_that_changes_meanwhile_is_refused(folder: Path) -> None:
    file = sorted(folder.rglob("*.txt"))[-1]

    def change(stage: str, done: int, total: int) -> None:
        if stage.startswith("training"):
            file.write_text("changed after it was listed")

    problem = problem_of(data_for(folder), change)
    assert (problem.value, problem.reason) == (file, "changed while the corpus was being prepared")
    assert list((folder.parent / "cache").iterdir()) == []


@pytest.mark.parametrize("stage", ["training", "tokenising", "merging"])
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
    assert os.listdir(data.cache) == [folder_of(after_kill).name]
    for path in folder_of(clean).iterdir():
        assert (folder_of(after_kill) / path.name).read_bytes() == path.read_bytes()


def test_damage_in_the_cache_is_named(folder: Path, quiet: Progress) -> None:
    prepared = prepare(data_for(folder), VOCAB, quiet)
    file = bin_path(prepared.train[0].prefix)
    file.write_bytes(file.read_bytes()[:-2])
    problem = problem_of(data_for(folder), quiet)
    assert (problem.value, problem.key) == (file, "token file")
    idx_path(prepared.train[0].prefix).unlink()
    assert "cannot be read" in problem_of(data_for(folder), quiet).reason
    record = folder_of(prepared) / "data.json"
    record.write_bytes(record.read_bytes()[:200])
    assert str(problem_of(data_for(folder), quiet)) == f"token file = {record}: is damaged"


def test_a_file_of_several_pieces_is_one_document(tmp_path: Path, quiet: Progress, texts: Texts) -> None:
    chance = random.Random(1)
    text = "\n".join(hashlib.sha256(chance.randbytes(4)).hexdigest() for _ in range(5000))
    assert len(text) > 4 * pieces.PIECE_CHARS
    (tmp_path / "big.txt").write_text(text)
    prepared = prepare(data_for(tmp_path / "big.txt", 0.0), VOCAB, quiet)
    assert texts(prepared) == ([text], [])


def test_the_standard_library_is_prepared_and_never_silent_for_long(tmp_path: Path) -> None:
    """In CPU time of all threads, which other processes on the machine do not stretch."""
    moments: dict[str, list[tuple[float, int, int]]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        moments.setdefault(stage.split()[0], []).append((time.process_time(), done, total))

    begin_s = time.process_time()
    prepared = prepare(Data(cache=str(tmp_path)), 4096, progress)
    end_s = time.process_time()
    assert prepared.train[0].tokens > 2_000_000
    assert list(moments) == ["listing", "training", "tokenising", "merging"]
    heard = [begin_s, *(moment for stage in moments.values() for moment, _, _ in stage), end_s]
    assert max(b - a for a, b in itertools.pairwise(heard)) < 4 * (os.cpu_count() or 1)
    for stage in ("training", "tokenising", "merging"):
        done = [done for _, done, _ in moments[stage]]
        assert done == sorted(done)
        assert done[-1] == moments[stage][-1][2]
