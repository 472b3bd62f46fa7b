"""The folder of a run: a new one, or that of the run which goes on."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO

from trigrid.checkpoint.folder import checkpoints
from trigrid.checkpoint.manifest import DTYPES, JOB, NAME, Damaged, Manifest, read_manifest
from trigrid.checkpoint.reading import job_of
from trigrid.checkpoint.restore import mismatches
from trigrid.data.loading import loaders, tell_data
from trigrid.data.prepare import Prepared, prepare, save
from trigrid.engine.zero import TORCH_DTYPE
from trigrid.errors import Problem, Refused, RunFailed
from trigrid.job import dump_job
from trigrid.report.console import Console
from trigrid.report.events import read_events
from trigrid.spec.job import Batch, Job, Optimizer
from trigrid.spec.precision import PRECISIONS
from trigrid.train.failure import replace

LATEST = "latest"


@dataclass(frozen=True)
class Opened:
    """run_dir; candidates: checkpoints to go on from, the first sound one of them; empty: from the beginning."""

    run_dir: Path
    candidates: tuple[Path, ...] = ()


def open_run(job: Job, name: str, resume: str | None, console: Console) -> Opened:
    """Prepare the data, or find it prepared, and open the run's folder with `job.toml` and `data.json`: a new one, or
    for `resume` ("latest", a run's folder or a checkpoint) that of the run that goes on.

    Raises Refused where there is nothing to go on from, "latest" apart, which then begins anew, and where what there is
    does not fit the job; nothing is written then.
    """
    run_dir, candidates = _find(job, name, resume, console) if resume is not None else (None, ())
    with console.progress() as progress:
        data = prepare(job.data, job.model.vocab, progress)
    # Before there is a run, and long before there is an engine.
    loaders(job, data)
    for path in candidates:
        try:
            check_same(job, data, path, read_manifest(path))
            break
        except Damaged:
            continue
    opened = Opened(run_dir or _new_run_dir(job, name), candidates)
    try:
        replace(opened.run_dir / JOB, dump_job(job))
        save(data, opened.run_dir / "data.json")
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        raise Refused([Problem("run.out" if run_dir is None else "--resume", opened.run_dir, reason)]) from None
    tell_data(job, data, console)
    return opened


def again(run_dir: Path, resume: str | None, restarted: bool) -> Opened:
    """A run that was opened before its ranks were started: it goes on from `resume`, where that is a checkpoint and the
    run has made none of its own since, else from its own newest, if it has come to one."""
    there = tuple(checkpoints(run_dir))
    if resume and resume != LATEST and _is_checkpoint(Path(resume)) and not (restarted and there):
        return Opened(run_dir, (Path(resume).resolve(),))
    return Opened(run_dir, there)


def launched_by(job: Job, name: str, launcher: str) -> Path | None:
    """The newest run that `launcher` has started ranks of before."""
    for run_dir in _runs(job, name):
        if any(event["kind"] == "launch" and event.get("launcher") == launcher for event in read_events(run_dir)):
            return run_dir
    return None


def linked(job: Job, launch: str) -> Path | None:
    """The run that ranks of the launch of this name have opened before."""
    link = Path(job.run.out) / launch
    return link.parent / link.readlink() if link.is_symlink() else None


def link(job: Job, launch: str, run_dir: Path) -> None:
    """A link of the name of the launch that leads to its run: where its script finds the marker of a run that was
    stopped. Raises RunFailed where it cannot be made."""
    try:
        aside = Path(job.run.out) / f".{launch}.{os.getpid()}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(os.path.relpath(run_dir, job.run.out))
        os.replace(aside, aside.with_name(launch))
    except OSError as error:
        raise RunFailed(f"no link {launch} can be made in run.out = {job.run.out}: {error.strerror}") from None


def _runs(job: Job, name: str) -> list[Path]:
    """Runs of this job, newest first."""
    out, stamped = Path(job.run.out), re.compile(rf"{re.escape(name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    found = [
        (match, path) for path in (out.iterdir() if out.is_dir() else ()) if (match := stamped.fullmatch(path.name))
    ]
    return [path for match, path in sorted(found, key=lambda f: (f[0][1], int(f[0][2] or 0)), reverse=True)]


def _is_checkpoint(path: Path) -> bool:
    """Whether `path` is one, or was meant to be: a damaged one is told as such, not as a folder that is none."""
    return (path / NAME).exists() or ((path / JOB).exists() and not (path / "data.json").exists())


def _find(job: Job, name: str, resume: str, console: Console) -> tuple[Path | None, tuple[Path, ...]]:
    """The run that goes on, None where that is a new one, and the checkpoints that it may go on from."""
    if resume == LATEST:
        for run_dir in _runs(job, name):
            if there := checkpoints(run_dir):
                return run_dir, tuple(there)
            console.say(f"{run_dir} has no checkpoint")
        console.say(f"no run of {name} in {job.run.out} has a checkpoint: a new one begins")
        return None, ()
    if not resume:
        raise Refused([Problem("--resume", '""', "is empty", (LATEST,))])
    path = Path(resume)
    if _is_checkpoint(path):
        run_dir = path.resolve().parent.parent
        own = path.resolve().parent.name == "checkpoints" and (run_dir / JOB).exists()
        return (run_dir if own else None), (path.resolve(),)
    if there := checkpoints(path):
        return path, tuple(there)
    reason = "is neither a checkpoint nor the folder of a run that has one"
    if not path.exists():
        reason = "there is no such folder"
    elif (path / "data.json").exists():
        reason = "is a run that has no checkpoint yet"
    near = [str(run_dir) for run_dir in _runs(job, name) if checkpoints(run_dir)][:3]
    raise Refused([Problem("--resume", resume, reason, tuple(near))])


def _new_run_dir(job: Job, name: str) -> Path:
    """A fresh folder under `job.run.out`, named by the job and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        run_dir = Path(job.run.out) / f"{name}-{stamp}{f'-{attempt}' if attempt else ''}"
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            reason = f"no folder for a run can be made here: {error.strerror}"
            raise Refused([Problem("run.out", job.run.out, reason)]) from None
        return run_dir
    raise RunFailed(f"no free name for a run in {job.run.out}")


def check_same(job: Job, data: Prepared, path: Path, manifest: Manifest) -> list[str]:
    """What of `job` differs from that of the checkpoint `path` and holds from now on, such as a learning rate.

    Raises Refused where it cannot be gone on with: another model, other data, another order of its samples.
    """
    if wrong := list(mismatches(job.model, manifest)):
        reason = f"{path} is of another model: {'; '.join(wrong[:4])}"
        raise Refused([Problem("model", job.model.name, reason)])
    if not manifest.trained:
        return []
    saved = job_of(path, manifest)
    wanted = TORCH_DTYPE[PRECISIONS[job.run.precision].master]
    formats = {DTYPES[stored.dtype] for _, kind, _, stored in manifest.stored() if kind == "mean"}
    if formats != {wanted}:
        reason = f"keeps moments in {wanted}, and {path} has them in {', '.join(map(str, formats))}"
        raise Refused([Problem("run.precision", job.run.precision, reason, (saved.run.precision,))])
    problems = [
        Problem(key, now, f"was {then} in {path}, which decides {what}", (then,))
        for key, now, then, what in (
            ("run.seed", job.run.seed, saved.run.seed, "the order of samples and the masks of dropout"),
            ("batch.sequence", job.batch.sequence, saved.batch.sequence, "what a sample is"),
            ("data.weights", list(job.data.weights), list(saved.data.weights), "the order of samples"),
        )
        if now != then
    ]
    if data.hash != manifest.state.data:
        reason = f"is data {data.hash}, and {path} was trained on {manifest.state.data}"
        way_out = "`trigrid checkpoint convert` makes weights of it, from which a new run can start"
        problems.append(Problem("data.corpus", list(job.data.corpus), f"{reason}; {way_out}"))
    if problems:
        raise Refused(problems)
    return list(_changes(saved, job))


def lock(run_dir: Path) -> IO[str]:
    """Hold the run against other processes for as long as the file that is returned is open. Raises Refused where it is
    being trained."""
    file = (run_dir / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            # A file system without locks.
            return open(os.devnull)
        reason = "is being trained by another process"
        raise Refused([Problem("--resume", run_dir, reason)]) from None
    return file


def check_shared(run_dir: Path, rank: int) -> None:
    """Raises Refused where this rank does not see the run's folder, which the first one has made."""
    if not (run_dir / "data.json").is_file():
        reason = f"rank {rank} on {socket.gethostname()} does not see it: all nodes must share its file system"
        raise Refused([Problem("run.out", run_dir, reason)])


NUMBERS = {
    "optimizer": tuple(field.name for field in fields(Optimizer)),
    "batch": tuple(field.name for field in fields(Batch)),
    "run": ("steps", "precision", "matmul_precision", "compile", "dropout", "attention_dropout"),
    "data": ("document_attention",),
}
"""Keys that bear on the numbers of a training and may change in it."""


def _changes(saved: Job, job: Job) -> Iterator[str]:
    for section, names in NUMBERS.items():
        for name in names:
            was, now = (getattr(getattr(one, section), name) for one in (saved, job))
            if was != now:
                yield f"{section}.{name} = {now}, and was {was}"
