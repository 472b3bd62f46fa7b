from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.data import lengths as lengths_module
from trigrid.data.inspect import describe, inspect
from trigrid.data.lengths import lengths_of
from trigrid.data.prepare import Prepared, prepare_folder
from trigrid.data.progress import Progress
from trigrid.data.tokens import TokenWriter, bin_path, open_tokens
from trigrid.errors import Refused


@pytest.fixture
def made(make_corpus: Callable[..., Path], tokenizer_file: Path, tmp_path: Path, quiet: Progress) -> Prepared:
    return prepare_folder(
        [str(make_corpus())],
        str(tokenizer_file),
        tmp_path / "out",
        vocab=0,
        validation_fraction=0.2,
        text_key="text",
        workers=1,
        progress=quiet,
    )


def write(prefix: Path, lengths: list[int], longest: int = 1000) -> Path:
    with TokenWriter(prefix, 500, longest) as writer:
        for number, length in enumerate(lengths):
            writer.add([number % 500] * length)
            writer.end_document()
    return prefix


def test_a_prepared_folder_tells_all(made: Prepared, tmp_path: Path, make_corpus: Callable[..., Path]) -> None:
    seen: list[tuple[int, int]] = []
    found = inspect(tmp_path / "out", 2, False, lambda stage, done, total: seen.append((done, total)))
    assert json.loads(json.dumps(asdict(found)))["vocab"] == found.vocab == 400
    assert [file.split for file in found.files] == ["train", "validation"]
    for file, tokens in zip(found.files, (made.train[0], made.validation[0]), strict=True):
        opened = open_tokens(tokens.prefix)
        assert (file.documents, file.tokens, file.dtype) == (tokens.documents, tokens.tokens, "uint16")
        assert file.bytes == sum(tokens.prefix.with_suffix(end).stat().st_size for end in (".bin", ".idx"))
        assert file.largest_id == int(opened.tokens.max())
        sizes = opened.lengths.tolist()
        of_documents = file.tokens_per_document
        assert (of_documents.min, of_documents.max) == (min(sizes), max(sizes))
        assert of_documents.mean == pytest.approx(np.mean(sizes))
        assert of_documents.median == np.percentile(sizes, 50, method="inverted_cdf")
        assert [sample.document for sample in file.samples] == [0, 1]
        assert (file.sha256, file.verified) != (None, True)
    first = next(
        path.read_text(encoding="utf-8")
        for path in sorted((tmp_path / "corpus").rglob("*.txt"))
        if path.read_text(encoding="utf-8").startswith(str(found.files[0].samples[0].text))
    )
    assert first
    assert seen[-1][0] == seen[-1][1] == sum(2 * file.tokens for file in found.files)
    told = describe(found)
    assert f"documents     {made.train[0].documents:,}" in told
    assert "(as recorded; --verify computes it)" in told


def test_the_hash_is_verified(made: Prepared, tmp_path: Path, quiet: Progress) -> None:
    recorded = inspect(tmp_path / "out", 0, False, quiet)
    verified = inspect(tmp_path / "out", 0, True, quiet)
    assert [file.sha256 for file in verified.files] == [file.sha256 for file in recorded.files]
    assert all(file.verified for file in verified.files)
    assert "(computed now)" in describe(verified)
    path = bin_path(made.train[0].prefix)
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    inspect(tmp_path / "out", 0, False, quiet)
    with pytest.raises(
        Refused, match=r"token file = .*train: is damaged: the hash of its content is [0-9a-f]{64}, and"
    ):
        inspect(tmp_path / "out", 0, True, quiet)
    raw[100:102] = b"\xff\xff"
    path.write_bytes(raw)
    with pytest.raises(
        Refused, match=r"train\.bin: is damaged: it holds id 65535, and its tokenizer's ids are below 400"
    ):
        inspect(tmp_path / "out", 0, False, quiet)


def test_a_prefix_is_shown_by_its_ids(tmp_path: Path, quiet: Progress) -> None:
    prefix = write(tmp_path / "t", [3, 100, 0, 7])
    for name in (prefix, tmp_path / "t.bin", tmp_path / "t.idx"):
        (file,) = inspect(name, 9, True, quiet).files
        assert (file.split, file.documents, file.tokens, file.largest_id) == (None, 4, 110, 3)
        assert (file.sha256 is not None, file.verified) == (True, True)
        assert [(one.tokens, one.ids[:2], len(one.ids), one.text) for one in file.samples] == [
            (3, (0, 0), 3, None),
            (100, (1, 1), 64, None),
            (0, (), 0, None),
            (7, (3, 3), 7, None),
        ]
    told = describe(inspect(prefix, 2, False, quiet))
    assert "largest id    3: model.vocab must be at least 4" in told
    assert "sha256        not recorded; --verify computes it" in told
    assert "document 0 (3 tokens): 0 0 0\n" in told
    assert told.endswith("1 1 …")


def test_one_file_of_a_prepared_folder(made: Prepared, quiet: Progress) -> None:
    found = inspect(made.validation[0].prefix, 1, True, quiet)
    (file,) = found.files
    assert (file.split, found.vocab) == ("validation", 400)
    assert file.samples[0].text


def test_what_is_no_token_file_is_refused(tmp_path: Path, quiet: Progress) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(Refused, match=r"is neither a folder that trigrid prepared nor the prefix of"):
            inspect(path, 0, False, quiet)
    write(tmp_path / "t", [4])
    (tmp_path / "t.bin").write_bytes(b"")
    with pytest.raises(Refused, match=r"t\.bin: is empty"):
        inspect(tmp_path / "t", 0, False, quiet)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    counted=st.integers(1, 50),
    block=st.integers(1, 70),
    longest=st.integers(1, 50),
)
def test_lengths_of_documents_are_exact(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], counted: int, block: int, longest: int
) -> None:
    prefix = write(tmp_path_factory.mktemp("lengths") / "t", lengths, longest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths_module, "COUNTED", counted)
        patch.setattr(lengths_module, "BLOCK_DOCUMENTS", block)
        found = lengths_of(open_tokens(prefix))
    expected = [int(np.percentile(lengths, share, method="inverted_cdf")) for share in (0, 50, 99, 100)]
    assert [found.min, found.median, found.p99, found.max] == expected
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))


def test_lengths_of_many_documents(tmp_path: Path) -> None:
    chance = random.Random(0)
    lengths = [chance.randrange(1, 30) for _ in range(5000)]
    found = lengths_of(open_tokens(write(tmp_path / "t", lengths)))
    assert found.p99 == 29
    assert found.median in (14, 15)
