"""The documents of a span, block by block, from whatever kind of source; a source that changes meanwhile is noticed."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path

from trigrid.data.corpus import KEY, Source, hub_name, stamp
from trigrid.data.lines import gzip_blocks, jsonl_blocks
from trigrid.data.pieces import Block
from trigrid.data.shards import Span
from trigrid.data.tables import table_blocks
from trigrid.errors import Problem, Refused

BLOCK_BYTES = 1 << 18


def read_blocks(span: Span, text_key: str, advance: Callable[[int], None]) -> Iterator[Block]:
    """The text of the span's documents, in order; `advance` is called with bytes as they are read.

    Raises Refused for a source that cannot be read, is not what it should be (lines.py, tables.py, UTF-8 here), or is
    no longer what was listed.
    """
    source, path = span.source, Path(span.source.path)
    _check_unchanged(source)
    try:
        match source.kind:
            case "text":
                yield from _text_blocks(path, advance)
            case "jsonl":
                yield from jsonl_blocks(path, span.start, span.stop, text_key, advance)
            case "gzip":
                yield from gzip_blocks(path, text_key, advance)
            case _:
                yield from table_blocks(source, span.start, span.stop, text_key, advance)
    except OSError as error:
        raise Refused([Problem(KEY, path, f"cannot be read: {error.strerror}")]) from None
    _check_unchanged(source)


def _check_unchanged(source: Source) -> None:
    path = Path(hub_name(source.path)[0] if source.kind == "hub" else source.path)
    if source.kind == "hub" and not path.exists():
        return
    if stamp(path) != (source.size_bytes, source.mtime_ns, source.ctime_ns):
        raise Refused([Problem(KEY, path, "changed while the corpus was being prepared")])


def _text_blocks(path: Path, advance: Callable[[int], None]) -> Iterator[Block]:
    """The file in blocks, each of the characters that its bytes complete."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done_bytes = 0
    with path.open("rb") as file:
        block = None
        while block != b"":
            block = file.read(BLOCK_BYTES)
            held_bytes = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=block == b"")
            except UnicodeDecodeError as error:
                offset = done_bytes - held_bytes + error.start
                raise Refused([Problem(KEY, path, f"is not UTF-8: {error.reason} at byte {offset}")]) from None
            done_bytes += len(block)
            advance(len(block))
            yield Block(text=text, last=block == b"", where=str(path))
