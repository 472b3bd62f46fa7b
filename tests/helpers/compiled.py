"""Blocks that are compiled, in worker processes. Most are compiled for torch's own kernels ("aot_eager"): the graphs,
what they keep and their order are those of the default backend, which takes a minute to make its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from helpers import probes
from trigrid.engine.comm import Comm
from trigrid.models import compiled
from trigrid.spec.job import Job

all_reduce = Comm.all_reduce


@contextmanager
def quickly() -> Iterator[None]:
    with patch.object(compiled, "BACKEND", "aot_eager"):
        yield


@contextmanager
def without_sums_over_tp() -> Iterator[None]:
    def reduce(self: Comm, tensor: Tensor, axis: str, op: Any = "sum") -> Tensor:
        return tensor if axis == "tp" and op == "sum" and tensor.dim() == 3 else all_reduce(self, tensor, axis, op)

    with quickly(), patch.object(Comm, "all_reduce", reduce):
        yield


def watch(rank: int, job: Job) -> probes.Seen:
    with quickly():
        return probes.watch(rank, job)


def in_graphs(job: Job) -> Job:
    return replace(job, run=replace(job.run, compile=True))
