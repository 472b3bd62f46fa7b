"""JSON Lines: one document a line, its text under one key of an object; the file may be gzipped."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from trigrid.data.corpus import KEY
from trigrid.data.pieces import Block
from trigrid.errors import Problem, Refused

LONGEST_LINE_BYTES = 1 << 26
SKIP_BYTES = 1 << 20


def jsonl_blocks(path: Path, start: int, stop: int, text_key: str, advance: Callable[[int], None]) -> Iterator[Block]:
    """The texts of the lines that begin in bytes [start, stop). Blank lines are none.

    Raises Refused, with `file:line`, for a line that is too long, not UTF-8 or not JSON, or has no text under the key.
    """
    with path.open("rb") as file:
        at = _first_line(file, start)
        while at < stop:
            line = file.readline(LONGEST_LINE_BYTES + 1)
            if not line:
                break
            try:
                text = line_text(line, text_key, first=at == 0)
            except _BadLine as bad:
                raise bad.refused(path, at, _lines_before(path, at) + 1) from None
            if text is not None:
                yield Block(text=text, last=True, where=f"{path}, the line at byte {at}")
            at += len(line)
            advance(len(line))


def gzip_blocks(path: Path, text_key: str, advance: Callable[[int], None]) -> Iterator[Block]:
    """The texts of all lines of a gzipped file; `advance` counts compressed bytes. Raises Refused as above."""
    at, number, seen_bytes = 0, 0, 0
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) as file:
            while line := file.readline(LONGEST_LINE_BYTES + 1):
                number += 1
                try:
                    text = line_text(line, text_key, first=at == 0)
                except _BadLine as bad:
                    raise bad.refused(path, at, number) from None
                if text is not None:
                    yield Block(text=text, last=True, where=f"{path}:{number}")
                at += len(line)
                advance(raw.tell() - seen_bytes)
                seen_bytes = raw.tell()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        reason = f"is truncated or damaged after line {number}: {error}"
        raise Refused([Problem(KEY, path, reason)]) from None


class _BadLine(Exception):
    """What is wrong with a line, before it is known which line it is."""

    def __init__(self, reason: str, *, key: str = KEY, value: object = None, legal: tuple[str, ...] = ()):
        self.reason, self.key, self.value, self.legal = reason, key, value, legal
        self.bad_byte: int | None = None

    def refused(self, path: Path, at: int, number: int) -> Refused:
        reason = self.reason if self.bad_byte is None else f"{self.reason} at byte {at + self.bad_byte}"
        value = path if self.value is None else self.value
        return Refused([Problem(self.key, value, reason, self.legal, f"{path}:{number}")])


def line_text(line: bytes, text_key: str, first: bool) -> str | None:
    """The text of a line; None where the line is blank."""
    if len(line) > LONGEST_LINE_BYTES:
        raise _BadLine(f"the line is longer than {LONGEST_LINE_BYTES:,} bytes, the limit")
    mark = len(codecs.BOM_UTF8) if first and line.startswith(codecs.BOM_UTF8) else 0
    try:
        content = line[mark:].decode().rstrip(" \t\r\n")
    except UnicodeDecodeError as error:
        bad = _BadLine(f"is not UTF-8: {error.reason}")
        bad.bad_byte = mark + error.start
        raise bad from None
    if not content.strip():
        return None
    try:
        row = json.loads(content)
    except json.JSONDecodeError as error:
        raise _BadLine(f"the line is no JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"the line cannot be read as JSON: {error}") from None
    if not isinstance(row, dict):
        raise _BadLine(f"the line holds {_json_type(row)}, not an object with the text under {text_key!r}")
    if text_key not in row:
        raise _BadLine("the object has no such key", key="data.text_key", value=text_key, legal=nearest(text_key, row))
    text = row[text_key]
    if not isinstance(text, str):
        raise _BadLine(f"holds {_json_type(text)}, not text", key="data.text_key", value=text_key)
    if not text.isascii() and (surrogate := _surrogate(text)):
        raise _BadLine(f"the text holds {surrogate}, half of a surrogate pair, which is no character")
    return text


def nearest(key: str, keys: dict[str, object] | list[str]) -> tuple[str, ...]:
    """All keys, the most alike first, at most eight."""
    alike = get_close_matches(key, keys, n=8, cutoff=0.5)
    return tuple([*alike, *(other for other in keys if other not in alike)][:8])


def _surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]


def _first_line(file: BinaryIO, start: int) -> int:
    """Moves to the first line that begins at or after byte `start`, and says where that is."""
    if start == 0:
        return 0
    # The byte before tells whether a line begins right here.
    file.seek(start - 1)
    while (block := file.readline(SKIP_BYTES)) and not block.endswith(b"\n"):
        pass
    return file.tell()


def _lines_before(path: Path, stop: int) -> int:
    lines = 0
    with path.open("rb") as file:
        while stop > 0 and (block := file.read(min(stop, SKIP_BYTES))):
            lines += block.count(b"\n")
            stop -= len(block)
    return lines
