"""What is in token files: counts, lengths of documents, the largest id, the hash, and a look at the text."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trigrid.data.lengths import Lengths, lengths_of
from trigrid.data.manifest import Input, Manifest, Recorded, is_prepared, read_manifest
from trigrid.data.merge import sha256_of
from trigrid.data.progress import Progress
from trigrid.data.tokenizer import Tokenizer, load_tokenizer
from trigrid.data.tokens import TokenFile, bin_path, idx_path, open_tokens
from trigrid.errors import Problem, Refused

BLOCK_TOKENS = 1 << 22
SAMPLE_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The start of a document: its first ids, and what they spell where the tokenizer is known."""

    document: int
    tokens: int
    ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True, kw_only=True)
class FileInspection:
    """One token file. split: "train" or "validation", None where that is not recorded.

    bytes: of `.bin` and `.idx`. sha256: as recorded, or as computed where asked for; verified: whether it was computed.
    """

    split: str | None
    prefix: str
    documents: int
    tokens: int
    bytes: int
    dtype: str
    tokens_per_document: Lengths
    largest_id: int
    sha256: str | None
    verified: bool
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A folder of token files or a single one. What only `data.json` tells is None or empty where there is none.

    vocab: all ids are below it. separator: the id that ends a document.
    """

    path: str
    trigrid: str | None
    inputs: tuple[Input, ...]
    empty_documents: int | None
    tokenizer: str | None
    library: str | None
    separator: int | None
    vocab: int | None
    files: tuple[FileInspection, ...]


def inspect(path: Path, samples: int, verify: bool, progress: Progress) -> Inspection:
    """Reads every token once. path: a folder that trigrid prepared, or a prefix of `.bin` and `.idx`, or one of both.

    samples: documents to show of each file. verify: compute the hash of the files and compare it to the recorded one.
    Memory does not grow with the files. `progress` is called from this thread.
    Raises Refused for what is no token file, and for one that is damaged: as `open_tokens`, and where the hash differs
    from the recorded one or an id is outside the recorded vocabulary.
    """
    # "." has no name of its own.
    path = Path(os.path.abspath(path.expanduser()))
    folder, prefix = _find(path)
    manifest = read_manifest(folder) if is_prepared(folder) else None
    wanted: list[tuple[str | None, Path, Recorded | None]] = []
    if manifest:
        for one in manifest.sets:
            for split, record in (("train", one.train), ("validation", one.validation)):
                if record and (prefix is None or record.name == prefix.name):
                    wanted.append((split, folder / record.name, record))
    if not wanted:
        assert prefix is not None
        manifest = None
        wanted = [(None, prefix, None)]

    tokenizer = load_tokenizer(folder / manifest.tokenizer, 1) if manifest else None
    opened = [open_tokens(one) for _, one, _ in wanted]
    total_bytes = sum(file.tokens.nbytes + (_file_bytes(file) if verify else 0) for file in opened)
    done_bytes = 0

    def advance(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        progress("reading token files (bytes)", done_bytes, total_bytes)

    return Inspection(
        path=str(path),
        trigrid=manifest.trigrid if manifest else None,
        inputs=manifest.inputs if manifest else (),
        empty_documents=manifest.empty_documents if manifest else None,
        tokenizer=manifest.tokenizer if manifest else None,
        library=manifest.library if manifest else None,
        separator=manifest.separator if manifest else None,
        vocab=manifest.vocab if manifest else None,
        files=tuple(
            _inspect_file(file, split, record, manifest, tokenizer, samples, verify, advance)
            for file, (split, _, record) in zip(opened, wanted, strict=True)
        ),
    )


def _find(path: Path) -> tuple[Path, Path | None]:
    """The folder, and the prefix where one file is meant."""
    if path.is_dir() and is_prepared(path):
        return path, None
    for prefix in (path, path.with_suffix("")) if path.suffix in (".bin", ".idx") else (path,):
        if prefix.name and (bin_path(prefix).is_file() or idx_path(prefix).is_file()):
            return prefix.parent, prefix
    reason = "is neither a folder that trigrid prepared nor the prefix of a .bin and an .idx file"
    raise Refused([Problem("token file", path, reason)])


def _inspect_file(
    file: TokenFile,
    split: str | None,
    record: Recorded | None,
    manifest: Manifest | None,
    tokenizer: Tokenizer | None,
    samples: int,
    verify: bool,
    advance: Callable[[int], None],
) -> FileInspection:
    smallest, largest = _ids(file.tokens, advance)
    if smallest < 0:
        raise Refused([Problem("token file", bin_path(file.prefix), f"is damaged: it holds id {smallest}")])
    if manifest and largest >= manifest.vocab:
        reason = f"is damaged: it holds id {largest}, and its tokenizer's ids are below {manifest.vocab}"
        raise Refused([Problem("token file", bin_path(file.prefix), reason)])
    sha256 = sha256_of(file.prefix, advance) if verify else record.sha256 if record else None
    if record and sha256 != record.sha256:
        reason = (
            f"is damaged: the hash of its content is {sha256}, and {record.sha256} was recorded when it was written"
        )
        raise Refused([Problem("token file", file.prefix, reason)])
    return FileInspection(
        split=split,
        prefix=str(file.prefix),
        documents=file.document_count,
        tokens=len(file.tokens),
        bytes=_file_bytes(file),
        dtype=file.tokens.dtype.name,
        tokens_per_document=lengths_of(file),
        largest_id=largest,
        sha256=sha256,
        verified=verify,
        samples=tuple(_sample(file, number, tokenizer) for number in range(min(samples, file.document_count))),
    )


def _ids(tokens: NDArray[np.integer[Any]], advance: Callable[[int], None]) -> tuple[int, int]:
    """The smallest and the largest id."""
    smallest = largest = 0
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS]
        smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
        advance(block.nbytes)
    return smallest, largest


def _sample(file: TokenFile, document: int, tokenizer: Tokenizer | None) -> Sample:
    start, stop = file.begins(document), file.begins(document + 1)
    ids = tuple(int(id) for id in file.tokens[start : min(stop, start + SAMPLE_TOKENS)])
    text = tokenizer.decode(ids) if tokenizer else None
    return Sample(document=document, tokens=stop - start, ids=ids, text=text)


def _file_bytes(file: TokenFile) -> int:
    return bin_path(file.prefix).stat().st_size + idx_path(file.prefix).stat().st_size


def describe(inspection: Inspection) -> str:
    """An inspection in words, for a person."""
    lines = [inspection.path]
    if inspection.trigrid:
        sources = ", ".join(f"{one.entry} ({one.sources:,} sources, {one.bytes:,} bytes)" for one in inspection.inputs)
        lines += [
            f"  made by       trigrid {inspection.trigrid} from {sources}",
            f"  left out      {inspection.empty_documents:,} empty documents",
            f"  tokenizer     {inspection.tokenizer} ({inspection.library}), ids below {inspection.vocab:,}, "
            f"separator {inspection.separator}",
        ]
    for file in inspection.files:
        lines += _describe_file(file)
    return "\n".join(lines)


def _describe_file(file: FileInspection) -> list[str]:
    lengths = file.tokens_per_document
    hashed = "not recorded; --verify computes it"
    if file.sha256:
        hashed = f"{file.sha256} ({'computed now' if file.verified else 'as recorded; --verify computes it'})"
    lines = [
        f"{file.split or 'token file'}: {file.prefix}",
        f"  documents     {file.documents:,}",
        f"  tokens        {file.tokens:,} ({file.dtype}; {file.bytes:,} bytes on disk)",
        f"  per document  min {lengths.min:,}, median {lengths.median:,}, mean {lengths.mean:,.1f}, "
        f"p99 {lengths.p99:,}, max {lengths.max:,}",
        f"  largest id    {file.largest_id:,}: model.vocab must be at least {file.largest_id + 1:,}",
        f"  sha256        {hashed}",
    ]
    for sample in file.samples:
        more = "" if sample.tokens <= len(sample.ids) else " …"
        shown = repr(sample.text) if sample.text is not None else " ".join(map(str, sample.ids))
        lines.append(f"  document {sample.document} ({sample.tokens:,} tokens): {shown}{more}")
    return lines
