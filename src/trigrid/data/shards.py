"""A corpus cut into shards: pieces of work of about the same size, each tokenised by one process to a part of its own.

The cut depends on the corpus alone, never on the number of processes: so the parts, and what is made of them, do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trigrid.data import tables
from trigrid.data.corpus import Source

SHARD_BYTES = 1 << 25
"""Some 30 seconds of work for a core: what each process loses when it is killed. A file of text is never cut."""


GZIP_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class Span:
    """Part of a source: bytes of a file, rows of a table, row groups of a Parquet file, or files of a hub's data set.

    A line of JSON belongs to the span that its first byte is in. bytes: what it counts in the progress shown.
    """

    source: Source
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Spans of one set of the corpus (its place in the list of sets), in the order of their documents."""

    set: int
    spans: tuple[Span, ...]

    @property
    def bytes(self) -> int:
        return sum(span.bytes for span in self.spans)


def cut_into_shards(sets: Sequence[Sequence[Source]], text_key: str) -> tuple[Shard, ...]:
    """Raises Refused for a table that cannot be read, or has no column `text_key`."""
    shards = []
    for number, sources in enumerate(sets):
        open_spans: list[Span] = []
        open_bytes = 0
        for source in sources:
            for span in _spans(source, text_key):
                if open_spans and (open_bytes + span.bytes > SHARD_BYTES or source.kind == "hub"):
                    shards.append(Shard(set=number, spans=tuple(open_spans)))
                    open_spans, open_bytes = [], 0
                open_spans.append(span)
                open_bytes += span.bytes
        shards.append(Shard(set=number, spans=tuple(open_spans)))
    return tuple(shards)


def text_bytes(shard: Shard) -> int:
    """About how much text there is in a shard: of a gzipped file four times its size."""
    return sum(span.bytes * (GZIP_FACTOR if span.source.kind == "gzip" else 1) for span in shard.spans)


def _spans(source: Source, text_key: str) -> Iterator[Span]:
    if source.kind in ("text", "gzip"):
        yield Span(source=source, start=0, stop=source.size_bytes, bytes=source.size_bytes)
    elif source.kind == "jsonl":
        for start in range(0, source.size_bytes, SHARD_BYTES):
            stop = min(start + SHARD_BYTES, source.size_bytes)
            yield Span(source=source, start=start, stop=stop, bytes=stop - start)
    else:
        for start, stop, size_bytes in tables.cut(source, text_key, SHARD_BYTES):
            yield Span(source=source, start=start, stop=stop, bytes=size_bytes)
