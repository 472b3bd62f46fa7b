"""The documents of a corpus: which files, in which order, and their text.

One file is one document. The entry "stdlib" means the source of the Python standard library: every `.py` file of the
modules that `sys.stdlib_module_names` lists, without test folders. That leaves out installed packages and files made
for one machine, and gives about 12 MB in 730 files with Python 3.11. Any other entry is a file, or a folder taken with
everything below it except names that begin with a dot; links to folders are not followed. ("./stdlib" is the folder.)
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trigrid.data.progress import Progress
from trigrid.errors import Problem, Refused

KEY = "data.corpus"
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
BLOCK_BYTES = 1 << 18
PIECE_CHARS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file of the corpus as it was when it was surveyed; `sha256` is of its bytes."""

    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a document's text; the parts of one document follow one another and `last` marks the end of it."""

    document: Document
    text: str
    last: bool


def corpus_files(corpus: Sequence[str], progress: Progress) -> tuple[Path, ...]:
    """The files of all entries: entries in the order given, sorted within each, a file reached twice taken once.

    Raises Refused, for all entries at once, where one is missing or holds no file.
    """
    files: dict[Path, Path] = {}
    problems = [] if corpus else [Problem(KEY, "()", "names no file or folder", ("stdlib",))]
    for entry in corpus:
        path = Path(entry).expanduser()
        if entry == "stdlib":
            found = _stdlib_files(progress)
        elif path.is_dir():
            found = _folder_files(path, progress)
        elif path.exists():
            found = [path]
        else:
            problems.append(Problem(KEY, entry, "no such file or folder"))
            continue
        if not found:
            problems.append(Problem(KEY, entry, "holds no file"))
        for file in found:
            files.setdefault(file.resolve(), file)
    if problems:
        raise Refused(problems)
    return tuple(files.values())


def survey(corpus: Sequence[str], progress: Progress) -> tuple[Document, ...]:
    """Reads every file of the corpus once, without keeping text; empty files are no documents.

    Raises Refused for a file that cannot be read or is not UTF-8 (with the offset of the first bad byte), and for a
    corpus without any text.
    """
    files = corpus_files(corpus, progress)
    total_bytes = sum(file.stat().st_size for file in files if file.exists())
    done_bytes = 0
    documents = []
    for file in files:
        digest, size_bytes = hashlib.sha256(), 0
        for block, _ in _read_blocks(file):
            digest.update(block)
            size_bytes += len(block)
            progress("reading the corpus (bytes)", done_bytes + size_bytes, total_bytes)
        if size_bytes:
            documents.append(Document(path=file, size_bytes=size_bytes, sha256=digest.hexdigest()))
        done_bytes += size_bytes
    if not documents:
        raise Refused([Problem(KEY, ", ".join(corpus), f"holds no text: {len(files)} files, all of them empty")])
    return tuple(documents)


def read_pieces(documents: Sequence[Document], piece_chars: int = PIECE_CHARS) -> Iterator[Piece]:
    """The text of the documents, in order, in pieces of at most `piece_chars` characters.

    So memory is bounded whatever the size of a file. A document is cut between a letter or digit and a blank, where the
    usual pre-tokenizers cut too: the tokens of the pieces, joined, are those of the whole. A stretch of `piece_chars`
    without such a place is cut at its end.
    Raises Refused for a document that has changed since it was surveyed.
    """
    for document in documents:
        digest, pending = hashlib.sha256(), ""
        for block, text in _read_blocks(document.path):
            digest.update(block)
            pending += text
            while len(pending) > piece_chars:
                cut = _place_to_cut(pending, piece_chars)
                yield Piece(document=document, text=pending[:cut], last=False)
                pending = pending[cut:]
        if digest.hexdigest() != document.sha256:
            raise Refused([Problem(KEY, document.path, "changed while the corpus was being prepared")])
        yield Piece(document=document, text=pending, last=True)


def _stdlib_files(progress: Progress) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in root.iterdir() if path.name.removesuffix(".py") in sys.stdlib_module_names]
    inside = [file for path in modules if path.is_dir() for file in _folder_files(path, progress, TEST_FOLDERS)]
    return _sorted_below(root, [path for path in (*modules, *inside) if path.suffix == ".py"])


def _folder_files(root: Path, progress: Progress, without: frozenset[str] = frozenset()) -> list[Path]:
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
        progress("listing the corpus (files)", len(files), 0)
    return _sorted_below(root, files)


def _sorted_below(root: Path, files: list[Path]) -> list[Path]:
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _read_blocks(path: Path) -> Iterator[tuple[bytes, str]]:
    """The file in blocks of bytes, each with the characters that it completes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    start_bytes = 0
    if path.exists() and not path.is_file():
        raise Refused([Problem(KEY, path, "is not a regular file")])
    try:
        with path.open("rb") as file:
            block = None
            while block != b"":
                block = file.read(BLOCK_BYTES)
                held_bytes = len(decoder.getstate()[0])
                text = decoder.decode(block, final=block == b"")
                start_bytes += len(block)
                yield block, text
    except UnicodeDecodeError as error:
        offset = start_bytes - held_bytes + error.start
        raise Refused([Problem(KEY, path, f"is not UTF-8: {error.reason} at byte {offset}")]) from None
    except OSError as error:
        raise Refused([Problem(KEY, path, f"cannot be read: {error.strerror}")]) from None


def _place_to_cut(text: str, limit: int) -> int:
    for place in range(limit, 0, -1):
        if text[place] in " \n" and text[place - 1].isalnum():
            return place
    return limit
