"""Steps that are sampled, on one rank of a pool."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from trigrid.check.parity import batch, share
from trigrid.engine.comm import Comm
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.spec.job import Job
from trigrid.train.sampling import Sampler

STEPS = 4
LATE_S = 0.5


def sampled_steps(rank: int, job: Job, folder: str, planted: dict[str, int]) -> None:
    """`STEPS` steps with a sampler. planted: "more": each takes another sum; "slow": the rank that sleeps
    before its update."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    tokens, labels = (share(rows, job, comm.coord.dp) for rows in batch(job, 0))
    sampler = Sampler(engine, Path(folder), 0, "cpu", comm.grid.world, 0)
    for step in range(1, STEPS + 1):
        sampled = sampler.begin(may=True)
        engine.accumulate(tokens, labels, None, 0)
        gradients = engine.sum_gradients()
        if "more" in planted:
            comm.all_reduce(torch.zeros(1), "world")
        if planted.get("slow") == rank:
            time.sleep(LATE_S)
        result = engine.update(gradients, job.optimizer.lr)
        if sampled:
            sampler.end(step, 0.0, result.updated)
