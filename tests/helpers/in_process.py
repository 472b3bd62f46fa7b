"""A run in the process of the test, on one rank: seconds less than a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from trigrid.job import load_job
from trigrid.report.console import Console
from trigrid.report.metrics import Summary
from trigrid.train import stopping, trainer


def train(job: Path, *flags: object, resume: object = None) -> Summary | None:
    """`trigrid train JOB FLAGS --resume RESUME`, without a word and without handlers of signals."""
    loaded = load_job(job, [str(flag) for flag in flags])
    with patch.object(stopping, "install"), patch.object(stopping, "grant"):
        return trainer.run_rank(loaded, job.stem, None, str(resume) if resume else None, Console(quiet=True))


def quick(steps: int, every: int = 2, **more: Any) -> tuple[object, ...]:
    """Flags of a short run that validates and tells nobody."""
    flags = {"run.trackers": "[]", "run.validate-every": 0, "checkpoint.every": every, "checkpoint.keep": 9, **more}
    return ("--steps", steps, "--precision", "fp32", *(f"--{key}={value}" for key, value in flags.items()))
