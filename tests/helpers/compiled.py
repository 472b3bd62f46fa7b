"""Blocks that are compiled, in worker processes. Most are compiled for torch's own kernels ("aot_eager"): the graphs,
what they keep and their order are those of the default backend, which takes a minute to make its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from helpers import probes
from trigrid.engine.traced import TracedComm
from trigrid.models import compiled
from trigrid.spec.job import Job


@contextmanager
def quickly() -> Iterator[None]:
    with patch.object(compiled, "BACKEND", "aot_eager"):
        yield


@contextmanager
def without_sums_over_tp() -> Iterator[None]:
    """In graphs alone."""
    with quickly(), patch.object(TracedComm, "summed", lambda self, tensor, axis: tensor.clone()):
        yield


def watch(rank: int, job: Job) -> probes.Seen:
    with quickly():
        return probes.watch(rank, job)


def in_graphs(job: Job) -> Job:
    return replace(job, run=replace(job.run, compile=True))
