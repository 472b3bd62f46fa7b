from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.data import lines
from trigrid.data.lines import gzip_blocks, jsonl_blocks
from trigrid.errors import Refused


def texts(path: Path, start: int = 0, stop: int | None = None, key: str = "text") -> list[str]:
    stop = path.stat().st_size if stop is None else stop
    return [block.text for block in jsonl_blocks(path, start, stop, key, lambda size_bytes: None)]


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.text(alphabet="ab\né\u2028", max_size=6), max_size=8),
    cuts=st.lists(st.integers(0, 200), max_size=4),
    blanks=st.booleans(),
    ended=st.booleans(),
)
def test_ranges_share_out_the_lines_each_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], cuts: list[int], blanks: bool, ended: bool
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "a.jsonl"
    content = ("\n \n" if blanks else "\n").join(json.dumps({"text": row}, ensure_ascii=False) for row in rows)
    path.write_bytes((content + "\n" * ended).encode())
    size = path.stat().st_size
    bounds = [0, *sorted(min(cut, size) for cut in cuts), size]
    found = [text for start, stop in itertools.pairwise(bounds) for text in texts(path, start, stop)]
    assert found == rows == texts(path)
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    counted: list[int] = []
    assert [block.text for block in gzip_blocks(packed, "text", counted.append)] == rows
    assert sum(counted) <= packed.stat().st_size


GOOD = b'{"text": "good", "id": 1}\n'
BAD = [
    (b'{"text": \n', "data.corpus = {path}: the line is no JSON: Expecting value at column 9"),
    (b"text\n", "data.corpus = {path}: the line is no JSON: Expecting value at column 1"),
    (b"[1]\n", "data.corpus = {path}: the line holds a list, not an object with the text under 'text'"),
    (b"null\n", "data.corpus = {path}: the line holds null, not an object with the text under 'text'"),
    (b'{"tekst": "x", "id": 1}\n', "data.text_key = text: the object has no such key; nearest legal: tekst, id"),
    (b'{"text": 5}\n', "data.text_key = text: holds a number, not text"),
    (b'{"text": true}\n', "data.text_key = text: holds a boolean, not text"),
    (b'{"text": null}\n', "data.text_key = text: holds null, not text"),
    (b'{"text": "caf\xe9"}\n', "data.corpus = {path}: is not UTF-8: invalid continuation byte at byte {byte}"),
    (
        b'{"text": "\\ud800"}\n',
        "data.corpus = {path}: the text holds \\ud800, half of a surrogate pair, which is no character",
    ),
    (b'{"text": "' + b"x" * 300 + b'"}\n', "data.corpus = {path}: the line is longer than 200 bytes, the limit"),
    (b'{"text": ' + b"9" * 5000 + b"}\n", "data.corpus = {path}: the line is longer than 200 bytes, the limit"),
]


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("line", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_bad_line_is_told_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, message: str, before: int
) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE_BYTES", 200)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * before + b"\n" + line + GOOD)
    where = before * len(GOOD) + 1 + line.find(b"\xe9")
    expected = f"{path}:{before + 2}: " + message.format(path=path, byte=where)
    for start in (0, before * len(GOOD)):
        with pytest.raises(Refused) as refused:
            texts(path, start)
        assert str(refused.value) == expected
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(Refused) as refused:
        list(gzip_blocks(packed, "text", lambda size_bytes: None))
    assert str(refused.value) == expected.replace(str(path), str(packed))


def test_deep_nesting_and_huge_numbers_are_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line in (b'{"text": ' + b"[" * 100_000, b'{"text": ' + b"9" * 5000 + b"}"):
        path.write_bytes(line)
        with pytest.raises(Refused, match=r"a\.jsonl:1: .*cannot be read as JSON"):
            texts(path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert texts(path) == ["good"]


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: b"no gzip", lambda raw: raw[:40] + b"x" * 40])
def test_a_damaged_gzip_file_is_told(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "a.jsonl.gz"
    rows = b"".join(json.dumps({"text": str(number) * 50}).encode() + b"\n" for number in range(3000))
    path.write_bytes(damage(gzip.compress(rows)))
    with pytest.raises(Refused, match=r"data.corpus = .*a\.jsonl\.gz: is truncated or damaged after line \d+: "):
        list(gzip_blocks(path, "text", lambda size_bytes: None))
