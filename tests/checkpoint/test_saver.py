"""Writing checkpoints: what happens to training meanwhile, and when the disk or a rank does not play along."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.jobs import named, small_job
from helpers.saved import engine_of, fill, save_now, told

from trigrid.check.pool import Pool
from trigrid.checkpoint import planners, storage
from trigrid.checkpoint import saver as saver_module
from trigrid.checkpoint.folder import aside, checkpoints, clear, path_of
from trigrid.checkpoint.manifest import State, read_manifest
from trigrid.checkpoint.reading import BoxReader
from trigrid.checkpoint.restore import verify
from trigrid.checkpoint.saver import Saver
from trigrid.spec.job import Job

JOB = small_job(named("dp2", zero=1))


def all_is_told(path: Path, but: float = 0.0) -> bool:
    """Whether a checkpoint holds what `fill` gives, plus `but`."""
    manifest, faults = verify(path)
    assert manifest is not None
    assert not faults
    return all(
        torch.equal(
            BoxReader(path, manifest).read(name, kind, [0] * len(p.shape), p.shape), told(name, kind, p.shape) + but
        )
        for name, kind, p, _ in manifest.stored()
    )


def train_on(rank: int, job: Job, run_dir: Path) -> tuple[float, float]:
    """Save, change every element at once, save, change, save; seconds that the first two calls took and waited."""
    engine = engine_of(job, rank)
    fill(engine)
    saver = Saver(engine, run_dir, engine.comm.host_group())
    for step in range(3):
        saver.save(State(step, updates=7))
        for name, bucket in engine.buckets.items():
            bucket.master += 1
            for moment in engine.optimizer.moments[name]:
                moment += 1
    outcomes = saver.finish()
    saver.close()
    assert [outcome.error for outcome in outcomes] == [None] * 3
    return outcomes[0].blocked_s, outcomes[0].seconds


@pytest.mark.parametrize("background", [True, False])
def test_the_snapshot_is_immune_to_later_steps(pool: Pool, tmp_path: Path, background: bool) -> None:
    """R74: what is changed right after the call, while files are written and buffers are used again, is not in it.
    R70: moments of every bucket are those of the optimizer."""
    job = replace(JOB, checkpoint=replace(JOB.checkpoint, background=background, keep=9))
    times = pool.run(train_on, 2, job, tmp_path)
    for step in range(3):
        assert all_is_told(path_of(tmp_path, step), but=step)
    for blocked_s, seconds in times:
        assert (blocked_s < seconds) if background else (blocked_s == seconds)


def no_memory(*_: object) -> Any:
    raise MemoryError("no room for a copy")


def save_where_one_fails(rank: int, job: Job, run_dir: Path, where: str, background: bool) -> list[list[str]]:
    """Three checkpoints, in the second of which rank 0 (in a snapshot or while it plans) or 1 (at the disk) fails."""
    engine = engine_of(job, rank)
    fill(engine)

    def full(path: Path, tensors: Any) -> Any:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    broken: dict[str, tuple[int, Any]] = {
        "snapshot": (0, patch.object(saver_module, "parts_written", no_memory)),
        "plan": (0, patch.object(planners, "create_default_global_save_plan", no_memory)),
        "disk": (1, patch.object(storage, "write_tensors", full)),
        "manifest": (0, patch.object(storage, "write_manifest", no_memory)),
    }
    victim, breaks = broken[where]
    told = [save_now(engine, run_dir, State(1, updates=7), background)]
    if rank == victim:
        with breaks:
            told.append(save_now(engine, run_dir, State(2, updates=7), background))
    else:
        told.append(save_now(engine, run_dir, State(2, updates=7), background))
    told.append(save_now(engine, run_dir, State(3, updates=7), background))
    return told


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("snapshot", "rank 0: MemoryError: no room for a copy"),
        ("plan", "rank 0: MemoryError: no room for a copy"),
        ("disk", "rank 1: [Errno 28] No space left on device"),
        ("manifest", "rank 0: MemoryError: no room for a copy"),
    ],
)
def test_one_rank_that_fails_is_told_by_all(pool: Pool, tmp_path: Path, where: str, words: str) -> None:
    """R72: no rank waits for one that gave up; the run lives, the one before is intact, the next one succeeds."""
    for first, second, third in pool.run(save_where_one_fails, 2, JOB, tmp_path, where, where != "plan"):
        assert (first, third) == ([], [])
        assert len(second) == 1
        assert words in second[0]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000003"]
    assert all(all_is_told(path) for path in checkpoints(tmp_path))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 72 MiB, which takes one small checkpoint beside what is left free, and no second."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=72m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_seen_before(small_disk: Path) -> None:
    """The checkpoint is not begun, the one before it stays, and the message has the figures."""
    job = small_job(named("dp1"), hidden=128)
    engine = engine_of(job, 0)
    assert save_now(engine, small_disk, State(1)) == []
    (error,) = save_now(engine, small_disk, State(2))
    assert "GB are needed in " in error
    assert "GB are free" in error
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000001"]
    assert verify(path_of(small_disk, 1))[1] == []


def test_a_disk_that_fills_up_meanwhile(small_disk: Path) -> None:
    """Somebody else takes the space after it was looked at: safetensors' own error is told as the disk's."""
    engine = engine_of(small_job(named("dp1"), hidden=128), 0)
    assert save_now(engine, small_disk, State(1)) == []
    (small_disk / "other").write_bytes(bytes(64 << 20))
    with patch.object(storage, "SPARE_BYTES", -(1 << 40)):
        (error,) = save_now(engine, small_disk, State(2))
    assert "No space left" in error
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000001"]
    assert verify(path_of(small_disk, 1))[1] == []
    (small_disk / "other").unlink()
    with patch.object(storage, "SPARE_BYTES", 0):
        assert save_now(engine, small_disk, State(3)) == []


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [(2, 0, [9, 10]), (1, 4, [4, 8, 10]), (3, 5, [5, 8, 9, 10]), (20, 0, [*range(1, 11)])],
)
def test_what_is_kept(tmp_path: Path, keep: int, keep_every: int, left: list[int]) -> None:
    job = replace(JOB, parallel=named("dp1"), checkpoint=replace(JOB.checkpoint, keep=keep, keep_every=keep_every))
    engine = engine_of(job, 0)
    for step in range(1, 11):
        assert save_now(engine, tmp_path, State(step)) == []
    assert sorted(read_manifest(path).state.step for path in checkpoints(tmp_path)) == left
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(left), "nothing else is left behind"


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    """A run that went back comes to a step that has a checkpoint already."""
    engine = engine_of(small_job(named("dp1")), 0)
    for rewinds in (0, 1):
        assert save_now(engine, tmp_path, State(4, rewinds=rewinds)) == []
    assert read_manifest(path_of(tmp_path, 4)).state.rewinds == 1
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """Where a step is saved again: the earlier one is back when the run goes on."""
    engine = engine_of(small_job(named("dp1")), 0)
    assert save_now(engine, tmp_path, State(4)) == []
    path = path_of(tmp_path, 4)
    shutil.copytree(path, aside(path))
    path.rename(path.with_name(f".{path.name}.old"))
    clear(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    assert verify(path)[1] == []
