"""Where the checkpoints of a run lie, and how one comes to be there whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

NAME = re.compile(r"step-(\d{8,})")


def path_of(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint's folder tells; None where it is no such name."""
    found = NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def aside(path: Path) -> Path:
    """Where the checkpoint `path` is written before it is complete."""
    return path.with_name(f".{path.name}.part")


def checkpoints(run_dir: Path) -> list[Path]:
    """Folders of complete checkpoints, newest first."""
    parent = run_dir / "checkpoints"
    found = [path for path in parent.iterdir() if step_of(path) is not None] if parent.is_dir() else []
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def publish(path: Path) -> None:
    """Make what lies aside for `path` the checkpoint, in place of one that is there already."""
    flush_folder(aside(path))
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        os.rename(path, old)
    os.rename(aside(path), path)
    flush_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint, where the disk lets it go. It ceases to be one before its first file goes."""
    gone = path.with_name(f".{path.name}.old")
    with suppress(OSError):
        os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def prune(run_dir: Path, keep: int, keep_every: int) -> None:
    """Remove all checkpoints but the newest `keep` and those of every `keep_every` steps."""
    for path in checkpoints(run_dir)[keep:]:
        step = step_of(path)
        if not keep_every or step is None or step % keep_every:
            remove(path)


def clear(run_dir: Path) -> None:
    """Remove what writers and removers that were killed have left behind."""
    parent = run_dir / "checkpoints"
    for path in sorted(parent.glob(".step-*")) if parent.is_dir() else ():
        before = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        if path.suffix == ".old" and not before.exists() and aside(before).exists():
            # Killed between the two renames of `publish`.
            os.rename(path, before)
        shutil.rmtree(path, ignore_errors=True)


def set_aside_after(run_dir: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, which a run that goes on from there will not lead to; returns their new
    names."""
    renamed = []
    for path in checkpoints(run_dir):
        if (step_of(path) or 0) > step:
            new = next(
                new
                for number in range(1_000)
                if not (new := path.with_name(f"set-aside-{number}-{path.name}")).exists()
            )
            with suppress(OSError):
                os.rename(path, new)
                renamed.append(new)
    return renamed


def flush_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
