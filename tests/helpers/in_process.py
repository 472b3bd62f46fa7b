"""A run in the process of the test, on one rank: seconds less than a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from trigrid.job import load_job
from trigrid.report.console import Console
from trigrid.report.metrics import Summary
from trigrid.train import stopping, trainer


def train(job: Path, *flags: object, resume: object = None) -> Summary | None:
    """`trigrid train JOB FLAGS --resume RESUME`, without a word and without handlers of signals."""
    # Small products on several threads mostly wait for each other.
    torch.set_num_threads(1)
    loaded = load_job(job, [str(flag) for flag in flags])
    with patch.object(stopping, "install"), patch.object(stopping, "grant"):
        ended = trainer.run_rank(loaded, job.stem, None, None if resume is None else str(resume), Console(quiet=True))
    return ended if isinstance(ended, Summary) else None


def quick(steps: int, every: int = 2, **more: Any) -> tuple[object, ...]:
    """Flags of a short run that validates and tells nobody."""
    flags = {"run.trackers": "[]", "run.validate-every": 0, "checkpoint.every": every, "checkpoint.keep": 9, **more}
    return ("--steps", steps, "--precision", "fp32", *(f"--{key}={value}" for key, value in flags.items()))
