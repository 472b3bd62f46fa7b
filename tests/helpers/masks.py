"""What dropout drops on one rank of a job."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trigrid.check.parity import batch, share
from trigrid.engine import dropout
from trigrid.engine.comm import Comm
from trigrid.grid import grid_of
from trigrid.models import attention
from trigrid.models.build import build_engine
from trigrid.spec.job import Job


@dataclass(frozen=True)
class Masks:
    """Of each microbatch and site, in the order of the forward: hidden [S, B, H], scores [B, N, S, S]; again: whether
    all that backward made were among those."""

    hidden: list[Tensor]
    scores: list[Tensor]
    again: bool


def masks_of(rank: int, job: Job, step: int) -> Masks:
    """Of one accumulation of `job`, whose stage runs all forwards before all backwards or has one microbatch."""
    engine = build_engine(job, Comm(grid_of(job), rank), torch.device("cpu"))
    tokens, labels = (share(rows, job, engine.comm.coord.dp) for rows in batch(job, step))
    seen: dict[str, list[Tensor]] = {"hidden": [], "scores": []}

    def recorded(kind: str) -> Any:
        def record(rows: Tensor, columns: int, rate: float) -> Tensor:
            seen[kind].append(whole(rows, columns, rate))
            return seen[kind][-1]

        return record

    whole = dropout.dropped
    with ExitStack() as stack:
        for module, kind in ((dropout, "hidden"), (attention, "scores")):
            stack.enter_context(patch.object(module, "dropped", recorded(kind)))
        engine.accumulate(tokens, labels, consumed=step * job.batch.global_batch)
    first = {kind: found[: len(found) // 2] for kind, found in seen.items()}
    again = all(
        any(torch.equal(mask, known) for known in first[kind])
        for kind, found in seen.items()
        for mask in found[len(found) // 2 :]
    )
    return Masks(first["hidden"], first["scores"], again)
