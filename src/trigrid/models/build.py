"""An engine for a job."""

from __future__ import annotations

from functools import partial

import torch

from trigrid.engine.comm import Comm
from trigrid.engine.handover import Handover
from trigrid.engine.random import draw
from trigrid.engine.runtime import Engine
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.traced import TracedComm
from trigrid.engine.zero import TORCH_DTYPE, Initialise
from trigrid.models.decoder import Decoder, Rates
from trigrid.spec.job import Job
from trigrid.spec.precision import PRECISIONS


def build_engine(job: Job, comm: Comm, device: torch.device, initialise: Initialise | None = None) -> Engine:
    """The engine of `comm`'s rank; initial values come from the job's seed unless `initialise` gives others."""
    handover = Handover()
    tp = TensorParallel(comm, job.parallel.sequence_parallel, job.parallel.regather, handover)
    dtype = TORCH_DTYPE[PRECISIONS[job.run.precision].compute]
    rates = Rates(job.run.dropout, job.run.attention_dropout, job.run.seed)
    # A graph gathers again by what the compiler is told to keep, and hands its gradients out together.
    traced = TensorParallel(TracedComm(comm), job.parallel.sequence_parallel) if job.run.compile else None
    model = Decoder(job.model, tp, dtype, device, job.parallel.loss_chunks, dropout=rates, traced=traced)
    return Engine(job, comm, device, model.function, initialise or partial(draw, seed=job.run.seed), handover)
