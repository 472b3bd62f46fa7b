from __future__ import annotations

import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trigrid.data.tokens import TokenWriter, bin_path, idx_path, open_tokens
from trigrid.errors import Refused


def write(prefix: Path, documents: list[list[int]], vocab: int = 1000) -> None:
    with TokenWriter(prefix, vocab) as writer:
        for document in documents:
            writer.add(document)
            writer.end_document()


def test_the_bytes_are_megatrons(tmp_path: Path) -> None:
    write(tmp_path / "data.v1", [[1, 2, 3], [999]])
    assert (tmp_path / "data.v1.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 999)
    assert (tmp_path / "data.v1.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 2, 3)
        + struct.pack("<2i", 3, 1)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<3q", 0, 1, 2)
    )


@pytest.mark.parametrize(("vocab", "code", "width"), [(65_499, 8, 2), (65_500, 4, 4), (200_000, 4, 4)])
def test_the_width_follows_the_vocabulary(tmp_path: Path, vocab: int, code: int, width: int) -> None:
    write(tmp_path / "t", [[0, vocab - 1]], vocab)
    assert idx_path(tmp_path / "t").read_bytes()[17] == code
    assert bin_path(tmp_path / "t").stat().st_size == 2 * width
    assert open_tokens(tmp_path / "t").tokens.tolist() == [0, vocab - 1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 999), max_size=6), max_size=3), min_size=1, max_size=6),
    longest=st.integers(1, 5),
)
def test_what_is_written_is_read(tmp_path: Path, documents: list[list[list[int]]], longest: int) -> None:
    prefix = tmp_path / "t"
    with TokenWriter(prefix, 1000, longest) as writer:
        for document in documents:
            for part in document:
                writer.add(part)
            writer.end_document()
    flat = [[token for part in document for token in part] for document in documents]
    if not any(flat):
        with pytest.raises(Refused):
            open_tokens(prefix)
        return
    file = open_tokens(prefix)
    assert file.document_count == len(documents)
    assert file.lengths.min() > 0
    assert file.lengths.max() <= longest
    ends = np.concatenate([[0], np.cumsum(file.lengths)])[file.documents]
    pieces = [file.tokens[a:b].tolist() for a, b in pairwise(ends)]
    assert pieces == flat


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    prefix = tmp_path / "t"
    write(prefix, [[1, 2], [3]])
    for path in (idx_path(prefix), bin_path(prefix)):
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(Refused) as refused:
                open_tokens(prefix)
            assert str(refused.value).startswith(f"token file = {path}: is {'truncated' if size else 'empty'}")
        path.write_bytes(whole + b"\x00\x00")
        with pytest.raises(Refused, match="is longer than"):
            open_tokens(prefix)
        path.write_bytes(whole)
    open_tokens(prefix)


@pytest.mark.parametrize(
    ("offset", "content", "reason"),
    [
        (0, b"PK", "is no token index: it begins with b'PKIDIDX"),
        (9, b"\x02", "format version 2"),
        (17, b"\x07", "dtype code 7"),
        (17, b"\x04", "do not lie one after the other"),
        (34, b"\x05", "do not lie one after the other"),
        (42, b"\x08", "do not lie one after the other"),
        (58, b"\x01", "documents of sequences 1 to 2"),
        (74, b"\x03", "documents of sequences 0 to 3"),
    ],
)
def test_foreign_and_damaged_indices_are_refused(tmp_path: Path, offset: int, content: bytes, reason: str) -> None:
    prefix = tmp_path / "t"
    write(prefix, [[1, 2], [3]])
    raw = bytearray(idx_path(prefix).read_bytes())
    raw[offset : offset + len(content)] = content
    idx_path(prefix).write_bytes(raw)
    with pytest.raises(Refused, match=reason):
        open_tokens(prefix)


def test_missing_halves_and_no_documents_are_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "t"
    with pytest.raises(Refused, match=r"t\.idx: cannot be read: No such file"):
        open_tokens(prefix)
    write(prefix, [[1]])
    bin_path(prefix).unlink()
    with pytest.raises(Refused, match=r"t\.bin: cannot be read: No such file"):
        open_tokens(prefix)
    write(prefix, [])
    with pytest.raises(Refused, match=r"t\.bin: is empty"):
        open_tokens(prefix)


def test_an_error_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "t", [[1, 2, 3]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="invalid literal"), TokenWriter(tmp_path / "t", 1000) as writer:
        writer.add([int("no number")])
    with pytest.raises(AssertionError, match="left open"), TokenWriter(tmp_path / "t", 1000) as writer:
        writer.add([5])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("ids", [[-1], [1000], [70_000]])
def test_ids_outside_the_vocabulary_are_never_wrapped(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(AssertionError, match="out of range"), TokenWriter(tmp_path / "t", 1000) as writer:
        writer.add(ids)
    assert not list(tmp_path.iterdir())


def test_a_killed_writer_leaves_nothing_under_the_final_names(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from trigrid.data.tokens import TokenWriter\n"
        "with TokenWriter(Path(sys.argv[1]), 1000) as writer:\n"
        "    writer.add([1] * 100_000); writer.end_document(); os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "t")], check=False).returncode == 9
    assert [path.name for path in tmp_path.iterdir()] == ["t.bin.partial"]
    write(tmp_path / "t", [[1]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", "t.idx"]
