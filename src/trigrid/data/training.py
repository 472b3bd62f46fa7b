"""A tokenizer trained on the documents of a corpus that are not held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event

from trigrid.data.bpe import train_bpe
from trigrid.data.pieces import cut_into_pieces
from trigrid.data.progress import Progress, Stopped, watch
from trigrid.data.shards import Shard, text_bytes
from trigrid.data.split import Places, check_split, place_of, places_of, sample_place
from trigrid.data.tokenise import shard_blocks

SAMPLE_BYTES = 1 << 30
"""More text does not change a vocabulary by much (most merges are found in a hundredth of it), and counts all words."""


def train_on_corpus(
    shards: Sequence[Shard],
    names: Sequence[str],
    text_key: str,
    vocab: int,
    validation_fraction: float,
    path: Path,
    progress: Progress,
) -> None:
    """Trains a byte-level BPE of `vocab` entries on all sets and writes its file. names: the entries of each set.

    Of a corpus of more than `SAMPLE_BYTES` of text, an even sample of about that size is used: documents, and pieces of
    long ones, chosen by their hash.
    Raises Refused as reading does, where a set is empty that should not be, and where the text is too little.
    """
    share = SAMPLE_BYTES / max(sum(text_bytes(shard) for shard in shards), 1)
    sampled = f" on {share:.1%} of the corpus" if share < 1 else ""
    stage = f"training the tokenizer{sampled} (bytes read)"
    total_bytes, done_bytes, stop = sum(shard.bytes for shard in shards), 0, Event()

    def advance(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        if stop.is_set():
            raise Stopped

    def texts() -> Iterator[str]:
        sets = [Places() for _ in names]
        for shard in shards:
            for piece in cut_into_pieces(shard_blocks(shard, text_key, advance), cuttable=True):
                if place_of(piece.head) >= validation_fraction and sample_place(piece.head, piece.number) < share:
                    yield piece.text
                if piece.last:
                    sets[shard.set] += places_of(piece, validation_fraction)
        check_split(sets, names, validation_fraction)

    def tick() -> None:
        progress(stage, done_bytes, total_bytes)

    tick()
    aside = path.with_name(path.name + ".partial")
    watch(lambda: train_bpe(texts(), vocab, aside), tick, stop)
    tick()
    aside.replace(path)
