"""The work of one shard: its documents to a part of its own, a folder that has its name only when it is whole."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from trigrid.data.documents import read_blocks
from trigrid.data.pieces import Block, Piece, cut_into_pieces
from trigrid.data.shards import Shard
from trigrid.data.split import Places, place_of, places_of
from trigrid.data.tokenizer import Tokenizer
from trigrid.data.tokens import TokenWriter

CHUNK_CHARS = 1 << 18
"""Text in flight for each thread while tokenising: a quarter of a second of work and 10 MB of the library's results."""
UNFINISHED = "unfinished-"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a shard came to; `folder` holds its token files, `train` and `validation`."""

    places: Places
    folder: Path

    def documents(self, split: str) -> int:
        held_out = self.places.held_out
        return held_out if split == "validation" else self.places.documents - held_out


def part_folder(parts: Path, number: int) -> Path:
    return parts / f"part-{number:06}"


def read_part(parts: Path, number: int) -> Part:
    """What `write_part` left."""
    folder = part_folder(parts, number)
    return Part(places=Places(**json.loads((folder / "part.json").read_bytes())), folder=folder)


def write_part(
    shard: Shard,
    number: int,
    parts: Path,
    *,
    tokenizer: Tokenizer,
    text_key: str,
    validation_fraction: float,
    threads: int,
    advance: Callable[[int], None],
) -> None:
    """Tokenises a shard. `advance` is called with bytes of its spans, in all exactly `shard.bytes` of them.

    Raises Refused as reading does; then, and when the process is killed, no part is left.
    """
    folder = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parts))
    try:
        places = Places()
        with ExitStack() as stack:
            train = stack.enter_context(TokenWriter(folder / "train", tokenizer.vocab))
            held_out = stack.enter_context(TokenWriter(folder / "validation", tokenizer.vocab))
            pieces = cut_into_pieces(shard_blocks(shard, text_key, advance), tokenizer.cuttable)
            for chunk in _chunks(pieces, CHUNK_CHARS * threads):
                for piece, ids in zip(chunk, tokenizer.encode_batch([piece.text for piece in chunk]), strict=True):
                    writer = held_out if place_of(piece.head) < validation_fraction else train
                    writer.add(ids)
                    if piece.last:
                        added = places_of(piece, validation_fraction)
                        places += added
                        if added.documents:
                            writer.add([tokenizer.separator])
                            writer.end_document()
        (folder / "part.json").write_text(json.dumps(asdict(places)))
        folder.rename(part_folder(parts, number))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def shard_blocks(shard: Shard, text_key: str, advance: Callable[[int], None]) -> Iterator[Block]:
    """The documents of all spans; what reading a span counts is evened out to its bytes when it ends."""
    for span in shard.spans:
        left_bytes = span.bytes

        def count(size_bytes: int) -> None:
            nonlocal left_bytes
            # A line may end beyond its span, and a table's bytes are an estimate.
            step_bytes = min(size_bytes, left_bytes) if span.bytes else size_bytes  # noqa: B023
            left_bytes -= step_bytes
            advance(step_bytes)

        yield from read_blocks(span, text_key, count)
        if span.bytes:
            advance(left_bytes)


def _chunks(pieces: Iterator[Piece], limit_chars: int) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    chars = 0
    for piece in pieces:
        chunk.append(piece)
        chars += len(piece.text)
        if chars >= limit_chars or len(chunk) >= limit_chars // 16:
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk
