"""From sources to a folder of token files: tokenizer, parts, one merge; resumable, and the same for a job's cache and
for `trigrid data prepare`."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

import trigrid
from trigrid.data.cache import build_once
from trigrid.data.corpus import Source
from trigrid.data.documents import read_blocks
from trigrid.data.manifest import (
    FORMAT,
    KIND,
    Input,
    Manifest,
    Recorded,
    Set,
    is_prepared,
    read_manifest,
    write_manifest,
)
from trigrid.data.merge import merge_tokens
from trigrid.data.pieces import cut_into_pieces
from trigrid.data.progress import Progress
from trigrid.data.shards import SHARD_BYTES, Shard, cut_into_shards, text_bytes
from trigrid.data.split import Places, check_split, places_of
from trigrid.data.tokenise import UNFINISHED, Part, part_folder, read_part
from trigrid.data.tokenizer import Tokenizer, file_sha256, load_tokenizer
from trigrid.data.tokens import TOKEN_TYPES, token_type
from trigrid.data.training import train_on_corpus
from trigrid.data.workers import Task, write_parts
from trigrid.errors import Problem, Refused

FILE_OF_LIBRARY = {
    "tokenizers": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "tiktoken": "tokenizer.tiktoken",
}
FEW_FILES = 1000
BYTES_PER_TOKEN = 4
"""Of text: enough for a guess at the disk that is needed."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """sets: sources whose documents make one set; inputs: of all sets together, or one of each. tokenizer: a file, or
    None to train one of `vocab` entries."""

    sets: tuple[tuple[Source, ...], ...]
    inputs: tuple[Input, ...]
    tokenizer: Path | None
    tokenizer_sha256: str
    library: str
    vocab: int
    validation_fraction: float
    text_key: str

    def names(self) -> list[str]:
        """The entries of each set."""
        if len(self.sets) == 1:
            return [", ".join(one.entry for one in self.inputs)]
        return [one.entry for one in self.inputs]

    def plan(self) -> str:
        """SHA-256 of all that decides the files, as far as it can be told without reading a source: names below an
        entry, sizes and times of the last change stand for the content, as they do for make."""
        keyed = any(source.kind != "text" for sources in self.sets for source in sources)
        content = {
            "format": FORMAT,
            "shard_bytes": SHARD_BYTES,
            "sets": [
                [(source.kind, source.name, source.size_bytes, source.mtime_ns, source.ctime_ns) for source in sources]
                for sources in self.sets
            ],
            "tokenizer": self.tokenizer_sha256 if self.tokenizer else f"train {self.vocab}",
            "library": self.library,
            "validation_fraction": self.validation_fraction,
            "text_key": self.text_key if keyed else None,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def make_recipe(
    *,
    sets: Sequence[tuple[Source, ...]],
    inputs: Sequence[Input],
    tokenizer: str,
    vocab: int,
    validation_fraction: float,
    text_key: str,
) -> tuple[Recipe, Tokenizer | None]:
    """What to build, and the tokenizer if it is a file. Raises Refused for a file that is none."""
    path = None if tokenizer == "train" else Path(tokenizer).expanduser()
    loaded = load_tokenizer(path, 1) if path else None
    return Recipe(
        sets=tuple(sets),
        inputs=tuple(inputs),
        tokenizer=path,
        tokenizer_sha256=file_sha256(path) if path else "",
        library=loaded.library if loaded else f"tokenizers {tokenizers.__version__}",
        vocab=vocab,
        validation_fraction=validation_fraction,
        text_key=text_key,
    ), loaded


def build(recipe: Recipe, folder: Path, key: str, workers: int, progress: Progress) -> tuple[Manifest, bool]:
    """The folder of token files for `recipe`, and whether it was there. `progress` is called from this thread, about
    twice a second or more often.

    The files are the same for any number of workers, and whether or not earlier calls were killed on the way.
    Raises Refused for a source that cannot be used, a split that leaves a set empty, or a file system (`key` names it)
    that has no room; RunFailed where a worker dies.
    """

    def make(workshop: Path, whole: Path) -> None:
        _make(recipe, workshop, whole, workers, progress)

    cached = build_once(folder, recipe.plan(), make, is_prepared, key, progress)
    return read_manifest(folder), cached


def _make(recipe: Recipe, workshop: Path, whole: Path, workers: int, progress: Progress) -> None:
    shards = cut_into_shards(recipe.sets, recipe.text_key)
    _make_tokenizer(recipe, shards, workshop / "tokenizer", progress)
    tokenizer = load_tokenizer(workshop / "tokenizer", 1)
    parts = _make_parts(recipe, shards, workshop, tokenizer.vocab, workers, progress)
    sets = [Places() for _ in recipe.sets]
    for shard, part in zip(shards, parts, strict=True):
        sets[shard.set] += part.places
    check_split(sets, recipe.names(), recipe.validation_fraction)

    file = whole / FILE_OF_LIBRARY[tokenizer.library.split()[0]]
    shutil.copyfile(workshop / "tokenizer", file)
    write_manifest(
        Manifest(
            kind=KIND,
            format=FORMAT,
            trigrid=trigrid.__version__,
            plan=recipe.plan(),
            inputs=recipe.inputs,
            text_key=recipe.text_key,
            validation_fraction=recipe.validation_fraction,
            empty_documents=sum(places.empty for places in sets),
            tokenizer=file.name,
            tokenizer_sha256=file_sha256(file),
            library=tokenizer.library,
            separator=tokenizer.separator,
            vocab=tokenizer.vocab,
            dtype=np.dtype(TOKEN_TYPES[token_type(tokenizer.vocab)]).name,
            sets=_merge(recipe, shards, parts, whole, progress),
        ),
        whole,
    )


def _make_tokenizer(recipe: Recipe, shards: Sequence[Shard], path: Path, progress: Progress) -> None:
    if recipe.tokenizer:
        shutil.copyfile(recipe.tokenizer, path)
        if file_sha256(path) != recipe.tokenizer_sha256:
            raise Refused([Problem("data.tokenizer", recipe.tokenizer, "changed while the corpus was being prepared")])
        _look_ahead(recipe, shards)
    elif not path.exists():
        train_on_corpus(
            shards, recipe.names(), recipe.text_key, recipe.vocab, recipe.validation_fraction, path, progress
        )


def _look_ahead(recipe: Recipe, shards: Sequence[Shard]) -> None:
    """Refuses a split of a few files before hours are spent on them; of many documents it never leaves a set empty."""
    sources = [source for sources in recipe.sets for source in sources]
    if len(sources) > FEW_FILES or any(source.kind != "text" for source in sources):
        return
    sets = [Places() for _ in recipe.sets]
    for shard in shards:
        for span in shard.spans:
            blocks = read_blocks(span, recipe.text_key, lambda size_bytes: None)
            sets[shard.set] += places_of(next(cut_into_pieces(blocks, cuttable=True)), recipe.validation_fraction)
    check_split(sets, recipe.names(), recipe.validation_fraction)


def _make_parts(
    recipe: Recipe, shards: Sequence[Shard], workshop: Path, vocab: int, workers: int, progress: Progress
) -> list[Part]:
    folder = workshop / "parts"
    folder.mkdir(exist_ok=True)
    for unfinished in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(unfinished)
    todo = [(number, shard) for number, shard in enumerate(shards) if not part_folder(folder, number).exists()]
    total_bytes = sum(shard.bytes for shard in shards)
    found_bytes = total_bytes - sum(shard.bytes for _, shard in todo)
    item_bytes = np.dtype(TOKEN_TYPES[token_type(vocab)]).itemsize
    # Parts that are still to be made, and all of them once more when they are merged.
    tokens = sum(text_bytes(shard) for _, shard in todo) + sum(map(text_bytes, shards))
    _check_room(workshop, tokens // BYTES_PER_TOKEN * item_bytes)

    # What a hub's data set holds is not known before it is read.
    unknown = any(span.source.kind == "hub" for shard in shards for span in shard.spans)

    def tick(done_bytes: int) -> None:
        progress("tokenising (bytes)", found_bytes + done_bytes, 0 if unknown else total_bytes)

    task = Task(
        parts=folder,
        tokenizer=workshop / "tokenizer",
        text_key=recipe.text_key,
        validation_fraction=recipe.validation_fraction,
    )
    write_parts(task, todo, workers, tick)
    return [read_part(folder, number) for number in range(len(shards))]


def _merge(
    recipe: Recipe, shards: Sequence[Shard], parts: Sequence[Part], whole: Path, progress: Progress
) -> tuple[Set, ...]:
    total_bytes = sum(file.stat().st_size for part in parts for file in part.folder.glob("*.bin"))
    _check_room(whole, sum(file.stat().st_size for part in parts for file in part.folder.iterdir()))
    done_bytes = 0

    def advance(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        progress("merging (bytes)", done_bytes, total_bytes)

    def merged(number: int, split: str) -> Recorded | None:
        name = split if len(recipe.sets) == 1 else f"{split}-{number}"
        prefixes = [
            part.folder / split
            for shard, part in zip(shards, parts, strict=True)
            if shard.set == number and part.documents(split)
        ]
        return merge_tokens(prefixes, whole / name, advance) if prefixes else None

    sets = []
    for number in range(len(recipe.sets)):
        train = merged(number, "train")
        assert train is not None, "check_split let an empty set through"
        sets.append(Set(train=train, validation=merged(number, "validation")))
    return tuple(sets)


def _check_room(folder: Path, needed_bytes: int) -> None:
    """Raises OSError, as the file system would, before the work is done."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        reason = f"about {needed_bytes / 2**20:,.1f} MiB are needed here, and {free_bytes / 2**20:,.1f} MiB are free"
        raise OSError(errno.ENOSPC, reason, os.fspath(folder))
