"""Folders that are built once, and are either whole or not there; what a killed process left is gone on with."""

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


def build_once(
    folder: Path,
    plan: str,
    build: Callable[[Path, Path], None],
    is_whole: Callable[[Path], bool],
    key: str,
    progress: Progress,
) -> bool:
    """Makes `folder` by `build`; True where it was there already.

    `build` gets a workshop, which holds what an earlier call with the same `plan` left in it, and an empty folder to
    fill, which becomes `folder` when it returns. The workshop survives a process that is killed, interrupted, or out of
    disk, but not a corpus that is refused. One process builds at a time and the others wait.
    Raises Refused, about `key`, where the file system refuses.
    """
    workshop = folder.with_name(f".{folder.name}.partial")
    if is_whole(folder) and not workshop.exists():
        return True
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock"), progress):
            if is_whole(folder):
                # Killed between the folder's name and this.
                shutil.rmtree(workshop, ignore_errors=True)
                return True
            if folder.exists() and any(folder.iterdir()):
                reason = "is in the way, and is not what trigrid prepares: delete it"
                raise Refused([Problem(key, folder, reason)])
            _open_workshop(workshop, plan, key)
            whole = workshop / "whole"
            if whole.exists():
                shutil.rmtree(whole)
            whole.mkdir()
            try:
                build(workshop, whole)
            except Refused:
                shutil.rmtree(workshop)
                raise
            whole.rename(folder)
            shutil.rmtree(workshop)
    except OSError as error:
        reason = f"{error.strerror} ({error.filename or folder})"
        raise Refused([Problem(key, folder.parent, reason)]) from error
    return False


def _open_workshop(workshop: Path, plan: str, key: str) -> None:
    marker = workshop / "plan"
    if marker.is_file() and marker.read_text() != plan:
        reason = "holds what a call with other inputs left unfinished: repeat that one, or delete it"
        raise Refused([Problem(key, workshop, reason)])
    workshop.mkdir(exist_ok=True)
    marker.write_text(plan)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Held by one process at a time; the file goes when it is let go of."""
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("waiting for another process that prepares the same data", 0, 0)
                time.sleep(TICK_S)
                continue
            if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
                # Another process removed this file, which nobody else can see, before it was locked here.
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
