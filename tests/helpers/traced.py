"""Traces of ranks among their peers that do more than they should."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import Tensor

from trigrid.check.prove import Proof, trace_rank
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.zero import Bucket
from trigrid.plan.plan import Plan
from trigrid.spec.job import Job


def hoarding(rank: int, job: Job, planned: Plan) -> Proof:
    """Keeps the whole gradients of every unit after they were reduced."""
    close, kept = Bucket.close_gradients, []

    def closing(self: Bucket) -> None:
        kept.append(self._transient)
        close(self)

    with patch.object(Bucket, "close_gradients", closing):
        return trace_rank(rank, job, planned)


def talking(rank: int, job: Job, planned: Plan) -> Proof:
    """Sums over TP once more wherever a region ends."""
    leave = TensorParallel.leave

    def extra(self: Any, x: Tensor) -> Tensor:
        return self.comm.all_reduce(leave(self, x).clone(), "tp")  # type: ignore[no-any-return]

    with patch.object(TensorParallel, "leave", extra):
        return trace_rank(rank, job, planned)
