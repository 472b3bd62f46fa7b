"""Token files for a job, or for a folder of the user's: found where they are ready, made where they are not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trigrid.data.build import build, make_recipe
from trigrid.data.cache import cache_root
from trigrid.data.corpus import KEY, Entry, Source, once, resolve
from trigrid.data.manifest import NAME, Input, Manifest, is_prepared, read_manifest
from trigrid.data.progress import Progress
from trigrid.data.ready import Ready, open_ready, whole_set
from trigrid.data.sets import Prepared, TokenSet, load, save
from trigrid.data.split import check_fraction
from trigrid.data.tokenizer import KEY as TOKENIZER_KEY
from trigrid.data.tokenizer import check_fits, file_sha256, load_tokenizer
from trigrid.data.tokens import open_tokens
from trigrid.data.workers import cores
from trigrid.errors import Problem, Refused
from trigrid.spec.job import Data

__all__ = ["Prepared", "TokenSet", "load", "prepare", "prepare_folder", "save"]

HASH_DIGITS = 16


def prepare(data: Data, vocab: int, progress: Progress) -> Prepared:
    """Token files and a tokenizer for a model of `vocab` entries, in a cache folder named by what decides them.

    Without weights all entries to tokenise make one set of documents; with weights each makes its own, with one
    tokenizer for all. Entries that are token files already are sets of their own. A document belongs to the validation
    set by a hash of its content, whatever else is in the corpus; the tokenizer is trained on the others. A text that
    spells the separator is tokenised as ordinary characters. `progress` is called from this thread, about twice a
    second or more often.
    Raises Refused for a corpus, tokenizer, vocabulary, fraction or cache folder that cannot be used; then, as when the
    process is killed, no folder is left that a later call takes for a whole one.
    """
    check_fraction(data.validation_fraction)
    entries = resolve(data.corpus, progress)
    ready = {
        place: open_ready(entry, place, vocab, data.validation_fraction)
        for place, entry in enumerate(entries)
        if entry.ready
    }
    given = None if data.tokenizer == "train" else Path(data.tokenizer).expanduser()
    if len(ready) < len(entries):
        if ready and not given:
            raise _untrainable(entries, ready)
        return _with_text(data, vocab, entries, ready, progress)
    if given:
        check_fits(load_tokenizer(given, 1), given, vocab)
    path = given or next((one.tokenizer for one in ready.values() if one.tokenizer), None)
    if path:
        _check_same_tokenizer(entries, ready, path, file_sha256(path))
    return Prepared(
        train=tuple(one.train for one in ready.values()),
        validation=tuple(one.validation for one in ready.values() if one.validation),
        tokenizer=path,
        hash=_short([one.hash for one in ready.values()]),
        cached=True,
    )


def prepare_folder(
    inputs: Sequence[str],
    tokenizer: str,
    out: Path,
    *,
    vocab: int,
    validation_fraction: float,
    text_key: str,
    workers: int,
    progress: Progress,
) -> Prepared:
    """Makes the folder `out`: `train` and `validation` token files of all inputs, the tokenizer, and `data.json`.

    inputs: as in `data.corpus`, without token files. tokenizer: a file, or "train" for one of `vocab` entries. A folder
    that was made from the same inputs, going by their names, sizes and times of change, is found and left as it is.
    Raises Refused as `prepare` does, and for an `out` that holds something else.
    """
    check_fraction(validation_fraction)
    entries = resolve(inputs, progress)
    if problems := [Problem(KEY, entry.name, "is token files already") for entry in entries if entry.ready]:
        raise Refused(problems)
    sources = once([source for entry in entries for source in entry.sources])
    wanted, _ = make_recipe(
        sets=[sources],
        inputs=_inputs(entries),
        tokenizer=tokenizer,
        vocab=vocab,
        validation_fraction=validation_fraction,
        text_key=text_key,
    )
    out = out.resolve()
    if is_prepared(out):
        if read_manifest(out).plan != wanted.plan():
            raise _of_other_inputs(out)
    elif out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise Refused([Problem("--out", out, "exists, and is not a folder that trigrid prepared")])
    manifest, cached = build(wanted, out, "--out", workers, progress)
    if manifest.plan != wanted.plan():
        # Another process made it while this one waited.
        raise _of_other_inputs(out)
    return _prepared(manifest, out, {}, [(0, ", ".join(inputs))], cached)


def _with_text(
    data: Data, vocab: int, entries: Sequence[Entry], ready: dict[int, Ready], progress: Progress
) -> Prepared:
    texts = [place for place in range(len(entries)) if place not in ready]
    groups = [[place] for place in texts] if data.weights else [texts]
    wanted, loaded = make_recipe(
        sets=[_sources(entries, group) for group in groups],
        inputs=_inputs([entries[place] for place in texts]),
        tokenizer=data.tokenizer,
        vocab=vocab,
        validation_fraction=data.validation_fraction,
        text_key=data.text_key,
    )
    if wanted.tokenizer and loaded:
        check_fits(loaded, wanted.tokenizer, vocab)
        _check_same_tokenizer(entries, ready, wanted.tokenizer, wanted.tokenizer_sha256)
    folder = cache_root(data.cache) / wanted.plan()[:HASH_DIGITS]
    manifest, cached = build(wanted, folder, "data.cache", cores(), progress)
    named = [(group[0], ", ".join(entries[place].name for place in group)) for group in groups]
    try:
        return _prepared(manifest, folder, ready, named, cached)
    except Refused as refused:
        hint = f"; delete {folder}, and it is prepared again"
        raise Refused([replace(problem, reason=problem.reason + hint) for problem in refused.problems]) from None


def _of_other_inputs(out: Path) -> Refused:
    reason = f"holds token files of other inputs, or made in another way ({NAME} tells); name another folder"
    return Refused([Problem("--out", out, reason)])


def _sources(entries: Sequence[Entry], group: Sequence[int]) -> tuple[Source, ...]:
    return once([source for place in group for source in entries[place].sources])


def _inputs(entries: Sequence[Entry]) -> tuple[Input, ...]:
    return tuple(
        Input(
            entry=entry.name,
            sources=len(entry.sources),
            bytes=sum(source.size_bytes for source in entry.sources),
        )
        for entry in entries
    )


def _prepared(
    manifest: Manifest, folder: Path, ready: dict[int, Ready], named: Sequence[tuple[int, str]], cached: bool
) -> Prepared:
    """The sets of a folder, at the entries and with the names of `named`, and the ready ones, in the order of the
    entries."""
    train = {place: one.train for place, one in ready.items()}
    validation = {place: one.validation for place, one in ready.items() if one.validation}
    hashes = {place: one.hash for place, one in ready.items()}
    for made, (place, name) in zip(manifest.sets, named, strict=True):
        train[place] = whole_set(open_tokens(folder / made.train.name), place, name)
        hashes[place] = made.train.sha256
        if made.validation:
            validation[place] = whole_set(open_tokens(folder / made.validation.name), place, name)
            hashes[place] += made.validation.sha256
    return Prepared(
        train=tuple(train[place] for place in sorted(train)),
        validation=tuple(validation[place] for place in sorted(validation)),
        tokenizer=folder / manifest.tokenizer,
        hash=_short([hashes[place] for place in sorted(hashes)]),
        cached=cached,
    )


def _short(hashes: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:HASH_DIGITS]


def _untrainable(entries: Sequence[Entry], ready: dict[int, Ready]) -> Refused:
    names = ", ".join(entries[place].name for place in ready)
    legal = tuple(dict.fromkeys(str(one.tokenizer) for one in ready.values() if one.tokenizer))
    reason = f"{names} is ready tokens, which a tokenizer trained on the rest would give another meaning"
    return Refused([Problem(TOKENIZER_KEY, "train", reason, legal)])


def _check_same_tokenizer(entries: Sequence[Entry], ready: dict[int, Ready], path: Path, sha256: str) -> None:
    problems = [
        Problem(KEY, entries[place].name, f"was made with another tokenizer than {path}", (str(one.tokenizer),))
        for place, one in ready.items()
        if one.tokenizer and one.tokenizer_sha256 != sha256
    ]
    if problems:
        raise Refused(problems)
