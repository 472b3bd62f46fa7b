"""The files of a run's folder that the page may read: a fixed few, and never one that a link leads out to."""

from __future__ import annotations

from pathlib import Path

from trigrid.errors import Problem, Refused
from trigrid.report.events import NAME as EVENTS
from trigrid.report.history import NAME as METRICS
from trigrid.report.samples import NAME as SAMPLES
from trigrid.schedule.recorded import NAME as TRACE

JOB = "job.toml"
NAMES = (JOB, METRICS, EVENTS, SAMPLES, TRACE)


def check_folder(run_dir: Path) -> Path:
    """The folder itself, without links. Raises Refused where it is none of a run, or one of NAMES leads out of it."""
    if not run_dir.is_dir():
        reason = "is no folder of a run" if run_dir.exists() else "there is no such folder"
        raise Refused([Problem("run", run_dir, reason)])
    folder = run_dir.resolve()
    if file_in(folder, JOB) is None:
        raise Refused([Problem("run", run_dir, f"is no folder of a run: it has no {JOB}")])
    for name in NAMES:
        file_in(folder, name)
    return folder


def file_in(folder: Path, name: str) -> Path | None:
    """The file `name` of `folder`, which is resolved; None while it is not there. Raises Refused where it is a link
    out of the folder, or no file."""
    assert name in NAMES
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError):
        raise Refused([Problem("run", path, "leads nowhere")]) from None
    if not real.is_relative_to(folder):
        raise Refused([Problem("run", path, "leads out of the run's folder, and is not read")])
    if not real.is_file():
        raise Refused([Problem("run", path, "is no file")])
    return real
