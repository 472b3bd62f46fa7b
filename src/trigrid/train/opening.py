"""The folder of a run: a new one, or that of the run which goes on."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from trigrid.checkpoint.folder import checkpoints
from trigrid.checkpoint.manifest import JOB, NAME, Manifest
from trigrid.checkpoint.restore import Found
from trigrid.data.loading import loaders, tell_data
from trigrid.data.prepare import Prepared, prepare, save
from trigrid.errors import Problem, Refused, RunFailed, TrigridError
from trigrid.job import dump_job, load_job
from trigrid.report.console import Console
from trigrid.spec.job import Job

LATEST = "latest"


@dataclass(frozen=True)
class Opened:
    """run_dir; candidates: checkpoints to go on from, the first sound one of them; must: whether there has to be one.

    A candidate of another run, or of none, gives its weights and state to a new run.
    """

    run_dir: Path
    candidates: tuple[Path, ...] = ()
    must: bool = False


def open_run(job: Job, name: str, resume: str | None, console: Console) -> Opened:
    """Prepare the data, or find it prepared, and open the run's folder with `job.toml` and `data.json`: a new one, or
    for `resume` ("latest", a run's folder or a checkpoint) that of the run that goes on.

    Raises Refused where there is nothing to go on from; "latest" then begins anew.
    """
    found = _find(job, name, resume, console) if resume else None
    with console.progress() as progress:
        data = prepare(job.data, job.model.vocab, progress)
    # Before there is a run, and long before there is an engine.
    loaders(job, data)
    opened = found or Opened(_new_run_dir(job, name))
    if opened.run_dir == Path():
        opened = Opened(_new_run_dir(job, name), opened.candidates, opened.must)
    (opened.run_dir / "job.toml").write_text(dump_job(job), encoding="utf-8")
    save(data, opened.run_dir / "data.json")
    tell_data(job, data, console)
    return opened


def again(run_dir: Path, resume: str | None) -> Opened:
    """A run that was opened before its ranks were started: it goes on from `resume`, where that is a checkpoint, else
    from its own newest, if it has come to one."""
    if resume and resume != LATEST and _is_checkpoint(Path(resume)):
        return Opened(run_dir, (Path(resume),), must=True)
    there = tuple(checkpoints(run_dir))
    return Opened(run_dir, there, must=bool(there and resume))


def _is_checkpoint(path: Path) -> bool:
    """Whether `path` is one, or was meant to be: a damaged one is told as such, not as a folder that is none."""
    return (path / NAME).exists() or ((path / JOB).exists() and not (path / "checkpoints").exists())


def _find(job: Job, name: str, resume: str, console: Console) -> Opened | None:
    if resume == LATEST:
        runs = sorted(Path(job.run.out).glob(f"{name}-*"), reverse=True)
        for run_dir in runs:
            if there := checkpoints(run_dir):
                return Opened(run_dir, tuple(there), must=True)
        console.say(f"no run of {name} in {job.run.out} has a checkpoint: a new one begins")
        return None
    path = Path(resume)
    if _is_checkpoint(path):
        run_dir = path.resolve().parent.parent
        own = path.resolve().parent.name == "checkpoints" and (run_dir / "job.toml").exists()
        return Opened(run_dir if own else Path(), (path,), must=True)
    if there := checkpoints(path):
        return Opened(path, tuple(there), must=True)
    reason = "is neither a checkpoint nor the folder of a run that has one"
    if not path.exists():
        reason = "there is no such folder"
    raise Refused([Problem("--resume", resume, reason, _near(job, name))])


def _near(job: Job, name: str) -> tuple[str, ...]:
    """The newest runs of this job that could be gone on with."""
    runs = sorted(Path(job.run.out).glob(f"{name}-*"), reverse=True)
    return tuple(str(run_dir) for run_dir in runs if checkpoints(run_dir))[:3]


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


def check_same(job: Job, data: Prepared, found: Found) -> list[str]:
    """What of `job` differs from the checkpoint's and holds from now on, such as a learning rate.

    Raises Refused where it cannot be gone on with: another model, other data, another order of its samples.
    """
    manifest = found.manifest
    if not _trained(manifest):
        return []
    try:
        saved = load_job(found.path / JOB)
    except TrigridError as error:
        raise TrigridError(f"{found.path / JOB}: is no job of this version: {error}") from None
    problems = [
        Problem(key, now, f"was {then} in {found.path}, which decides {what}", (then,))
        for key, now, then, what in (
            ("run.seed", job.run.seed, saved.run.seed, "the order of samples and the masks of dropout"),
            ("batch.sequence", job.batch.sequence, saved.batch.sequence, "what a sample is"),
            ("data.weights", list(job.data.weights), list(saved.data.weights), "the order of samples"),
        )
        if now != then
    ]
    if data.hash != manifest.state.data:
        reason = f"is data {data.hash}, and {found.path} was trained on {manifest.state.data}"
        way_out = "`trigrid checkpoint convert` makes weights of it, from which a new run can start"
        problems.append(Problem("data.corpus", list(job.data.corpus), f"{reason}; {way_out}"))
    if problems:
        raise Refused(problems)
    return list(_changes(saved, job))


def check_shared(run_dir: Path, rank: int) -> None:
    """Raises Refused where this rank does not see the run's folder, which the first one has made."""
    if not (run_dir / "data.json").is_file():
        reason = f"rank {rank} on {socket.gethostname()} does not see it: all nodes must share its file system"
        raise Refused([Problem("run.out", run_dir, reason)])


def _trained(manifest: Manifest) -> bool:
    return any(kind != "weight" for _, kind, _, _ in manifest.stored())


def _changes(saved: Job, job: Job) -> Iterator[str]:
    """Keys that bear on the numbers of the training, where they differ."""
    for section in ("optimizer", "batch", "run"):
        then, now = getattr(saved, section), getattr(job, section)
        for field in fields(now):
            key, was, value = f"{section}.{field.name}", getattr(then, field.name), getattr(now, field.name)
            if was != value and (section != "run" or field.name in ("steps", "precision", "dropout")):
                yield f"{key} = {value}, and was {was}"
