"""An engine for a job."""

from __future__ import annotations

from functools import partial

import torch

from trigrid.engine.comm import Comm
from trigrid.engine.random import draw
from trigrid.engine.runtime import Engine
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.zero import TORCH_DTYPE, Initialise
from trigrid.models.decoder import Decoder
from trigrid.spec.job import Job
from trigrid.spec.precision import PRECISIONS


def build_engine(job: Job, comm: Comm, device: torch.device, initialise: Initialise | None = None) -> Engine:
    """The engine of `comm`'s rank; initial values come from the job's seed unless `initialise` gives others."""
    tp = TensorParallel(comm, job.parallel.sequence_parallel, job.parallel.regather)
    dtype = TORCH_DTYPE[PRECISIONS[job.run.precision].compute]
    model = Decoder(job.model, tp, dtype, device, job.parallel.loss_chunks)
    return Engine(job, comm, device, model.function, initialise or partial(draw, seed=job.run.seed))
