"""An engine for a job."""

from __future__ import annotations

from functools import partial

import torch

from trigrid.engine.comm import Comm
from trigrid.engine.later import WeightQueue
from trigrid.engine.random import draw
from trigrid.engine.runtime import Engine
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.traced import TracedComm
from trigrid.engine.zero import TORCH_DTYPE, Initialise
from trigrid.models.decoder import Decoder, Rates
from trigrid.plan.scheduled import job_schedule, made_here
from trigrid.schedule.of_job import splits_backward
from trigrid.spec.job import Job
from trigrid.spec.precision import PRECISIONS


def build_engine(job: Job, comm: Comm, device: torch.device, initialise: Initialise | None = None) -> Engine:
    """The engine of `comm`'s rank; initial values come from the job's seed unless `initialise` gives others."""
    # One that is made may split backwards for some numbers of microbatches and not for others.
    later = WeightQueue() if made_here(job) or splits_backward(job_schedule(job)) else None
    tp = TensorParallel(comm, job.parallel.sequence_parallel, job.parallel.regather, later)
    dtype = TORCH_DTYPE[PRECISIONS[job.run.precision].compute]
    rates = Rates(job.run.dropout, job.run.attention_dropout, job.run.seed)
    # A graph gathers again by what the compiler is told to keep.
    traced = TensorParallel(TracedComm(comm), job.parallel.sequence_parallel) if job.run.compile else None
    assert traced is None or later is None, "gradients of weights cannot be put off in a graph"
    model = Decoder(job.model, tp, dtype, device, job.parallel.loss_chunks, dropout=rates, traced=traced)
    return Engine(job, comm, device, model.function, initialise or partial(draw, seed=job.run.seed), later)
