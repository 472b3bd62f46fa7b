"""Folders that are built once and are either whole or not there."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trigrid.data.progress import TICK_S, Progress
from trigrid.errors import Problem, Refused


def cache_root(configured: str) -> Path:
    """`configured` where it is given, else the user's cache folder (XDG base directories)."""
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trigrid"


def build_once(folder: Path, build: Callable[[Path], None], progress: Progress) -> bool:
    """Makes `folder` by `build`, which fills the empty folder that it is given; True where it was there already.

    The folder gets its name only when `build` has returned. One process builds at a time and the others wait, so what
    a killed process left is known to be dead and is removed. Raises Refused where the file system refuses.
    """
    if folder.is_dir():
        return True
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock"), progress):
            if folder.is_dir():
                return True
            partial = folder.with_name(f".{folder.name}.partial")
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
            try:
                build(partial)
                partial.rename(folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        reason = f"{error.strerror} ({error.filename or folder})"
        raise Refused([Problem("data.cache", folder.parent, reason)]) from error
    return False


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another process that prepares the same data", 0, 0)
                time.sleep(TICK_S)
        yield
