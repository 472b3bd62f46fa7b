"""A rank that is slower than the others."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from trigrid.check.parity import batch, share
from trigrid.engine.comm import Comm
from trigrid.engine.units import Microbatch
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.report.metrics import Slowest
from trigrid.spec.job import Job
from trigrid.train.meter import Meter


def slow_rank(rank: int, job: Job, culprit: int, seconds: float) -> Slowest | None:
    """Who is slowest over three steps in which one unit of rank `culprit` sleeps in each forward."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    if rank == culprit:
        unit = engine.stages[0].units[2]
        function = unit._function

        def slowly(w: Mapping[str, Tensor], x: Tensor, microbatch: Microbatch) -> Tensor:
            time.sleep(seconds)
            return function(w, x, microbatch)

        unit._function = slowly
    meter = Meter(comm, engine.device)
    for step in range(3):
        meter.begin()
        meter.loaded()
        engine.step(*(share(rows, job, comm.coord.dp) for rows in batch(job, step)), 1e-3)
        meter.end()
    return meter.read().slowest
