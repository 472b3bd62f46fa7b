"""The entries of a corpus: which files, in which order, and how each is read. Only file names and sizes are looked at.

An entry is one of

- "stdlib": the source of the Python standard library, every `.py` file of the modules that `sys.stdlib_module_names`
  lists, without test folders. That leaves out installed packages and files made for one machine, and gives about 12 MB
  in 730 files with Python 3.11. ("./stdlib" is a folder.)
- "hf:NAME" or "hf:NAME@split": a data set that the library `datasets` streams, from its hub or a folder.
- a folder that `trigrid data prepare` made, or the prefix of Megatron's `prefix.bin` and `prefix.idx`: ready tokens.
- a folder that `datasets` saved.
- any other folder, with everything below it except names that begin with a dot and folders of ready tokens; links to
  folders are not followed.
- a file: `.jsonl`, `.jsonl.gz`, and named by itself also `.json` and `.json.gz`, hold JSON Lines; `.parquet` and
  `.arrow` hold tables; any other file is one document of text.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trigrid.data.manifest import is_prepared
from trigrid.data.progress import Progress
from trigrid.data.tokens import bin_path, idx_path
from trigrid.errors import Problem, Refused

KEY = "data.corpus"
HUB = "hf:"
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})

Kind = Literal["text", "jsonl", "gzip", "parquet", "arrow", "saved", "hub"]
KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".jsonl.gz": "gzip", ".parquet": "parquet", ".arrow": "arrow"}
KINDS_ALONE: dict[str, Kind] = {".json": "jsonl", ".json.gz": "gzip"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Something that holds documents, as it was when it was listed.

    name: its path below the entry, so that a corpus that is moved stays the same corpus. ctime_ns: when the file system
    last changed the file, which unlike mtime_ns nobody can set. Of a folder, size_bytes is the sum and the times are
    the latest of its files; all are 0 where the source is not on this machine.
    """

    kind: Kind
    path: str
    name: str
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of the corpus: sources to tokenise, or `ready`, the folder or prefix of tokens made before."""

    name: str
    sources: tuple[Source, ...] = ()
    ready: Path | None = None


def resolve(corpus: Sequence[str], progress: Progress) -> tuple[Entry, ...]:
    """What each entry stands for, its files sorted.

    Raises Refused, for all entries at once, where one is missing, holds no file, or holds one that cannot be read.
    """
    problems = [] if corpus else [Problem(KEY, "()", "names no file or folder", ("stdlib",))]
    entries = []
    for name in corpus:
        try:
            entries.append(_resolve(name, progress))
        except Refused as refused:
            problems += refused.problems
    if problems:
        raise Refused(problems)
    return tuple(entries)


def once(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The sources without those that come a second time, by another entry or a link."""
    first: dict[str, Source] = {}
    for source in sources:
        first.setdefault(source.path if source.kind == "hub" else os.path.realpath(source.path), source)
    return tuple(first.values())


def hub_name(path: str) -> tuple[str, str]:
    """Name (or folder) and split of a hub's data set written as "NAME@split"; the split is "train" where none is."""
    name, _, split = path.rpartition("@") if "@" in path else (path, "", "train")
    folder = Path(name).expanduser()
    return (str(folder) if folder.exists() else name), split


def stamp(path: Path) -> tuple[int, int, int]:
    """Size in bytes, mtime and ctime in ns: of a file, or of all files in a folder.

    Raises Refused where it cannot be read, or is neither.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            files = [file.stat() for file in path.rglob("*") if file.is_file()]
            times = ((file.st_mtime_ns, file.st_ctime_ns) for file in files)
            latest = [max(column) for column in zip(*times, strict=True)] or [0, 0]
            return sum(file.st_size for file in files), latest[0], latest[1]
    except OSError as error:
        raise Refused([Problem(KEY, path, f"cannot be read: {error.strerror}")]) from None
    if not stat.S_ISREG(status.st_mode):
        raise Refused([Problem(KEY, path, "is not a regular file")])
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _resolve(name: str, progress: Progress) -> Entry:
    if name == "stdlib":
        root, files = _stdlib_files(progress)
        return Entry(name=name, sources=_sources(name, files, root))
    if name.startswith(HUB):
        path = Path(hub_name(name.removeprefix(HUB))[0])
        size_bytes, mtime_ns, ctime_ns = stamp(path) if path.exists() else (0, 0, 0)
        hub = Source(
            kind="hub",
            path=name.removeprefix(HUB),
            name=name,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            ctime_ns=ctime_ns,
        )
        return Entry(name=name, sources=(hub,))
    path = Path(name).expanduser()
    if path.is_dir():
        if is_prepared(path):
            return Entry(name=name, ready=path)
        if (path / "dataset_dict.json").is_file():
            splits = tuple(str(split.parent) for split in sorted(path.glob("*/state.json")))
            raise Refused([Problem(KEY, name, "holds several splits of a data set; name one of them", splits)])
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            return Entry(name=name, sources=(_source("saved", path, path.parent),))
        return Entry(name=name, sources=_sources(name, _folder_files(path, progress), path))
    for prefix in (path, path.with_suffix("")) if path.suffix in (".bin", ".idx") else (path,):
        if bin_path(prefix).is_file() and idx_path(prefix).is_file():
            return Entry(name=name, ready=prefix)
    if not path.exists():
        raise Refused([Problem(KEY, name, "no such file or folder")])
    kind = next((kind for suffix, kind in KINDS_ALONE.items() if path.name.endswith(suffix)), None)
    return Entry(name=name, sources=(_source(kind or _kind(path), path, path.parent),))


def _sources(name: str, files: list[Path], root: Path) -> tuple[Source, ...]:
    if not files:
        raise Refused([Problem(KEY, name, "holds no file")])
    return tuple(_source(_kind(file), file, root) for file in files)


def _source(kind: Kind, path: Path, root: Path) -> Source:
    size_bytes, mtime_ns, ctime_ns = stamp(path)
    name = path.relative_to(root).as_posix()
    return Source(kind=kind, path=str(path), name=name, size_bytes=size_bytes, mtime_ns=mtime_ns, ctime_ns=ctime_ns)


def _kind(path: Path) -> Kind:
    return next((kind for suffix, kind in KINDS.items() if path.name.endswith(suffix)), "text")


def _stdlib_files(progress: Progress) -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in root.iterdir() if path.name.removesuffix(".py") in sys.stdlib_module_names]
    inside = [file for path in modules if path.is_dir() for file in _folder_files(path, progress, TEST_FOLDERS)]
    return root, _sorted_below(root, [path for path in (*modules, *inside) if path.suffix == ".py"])


def _folder_files(root: Path, progress: Progress, without: frozenset[str] = frozenset()) -> list[Path]:
    """What is below `root`, without names that begin with a dot and without prepared tokens, which may lie in there."""
    files: list[Path] = []

    def refuse(error: OSError) -> None:
        raise Refused([Problem(KEY, error.filename, f"cannot be read: {error.strerror}")]) from None

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in without and not is_prepared(Path(folder, name))
        ]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
        progress("listing the corpus (files)", len(files), 0)
    return _sorted_below(root, files)


def _sorted_below(root: Path, files: list[Path]) -> list[Path]:
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())
