"""What differs between the backends whose collectives the engine calls."""

from __future__ import annotations

from typing import Literal, NamedTuple

from trigrid.plan.measured_file import load_measured
from trigrid.spec.job import Job


def backend_of(job: Job) -> Literal["gloo", "nccl"]:
    """Whose collectives the engine calls in `job`: gloo's on CPUs; where nothing tells, it is planned for GPUs.

    A calibration that was measured on CPUs tells. Raises Refused for one that cannot be read.
    """
    calibration = job.cluster.calibration
    if job.run.device == "auto" and calibration:
        return "gloo" if load_measured(calibration).about.get("device") == "cpu" else "nccl"
    return "gloo" if job.run.device == "cpu" else "nccl"


EXCHANGE_BYTES = 2**20
"""Up to which two ranks on gloo reduce by exchanging whole arrays: it takes two thirds of the processor's time of
gloo's ring at 512 KiB and as much at 4 MiB."""


class Scattered(NamedTuple):
    """Bytes of a reduce-scatter beside what it reads. arriving: while it is under way; summed: what is made of them at
    its end, and is there beside them for a moment, where what arrives is not the result yet."""

    arriving: float
    summed: float


def scattered(full: float, ranks: int, gloo: bool) -> Scattered:
    """Of a reduce-scatter of `full` bytes among `ranks`. On gloo it is an exchange and a sum: two ranks each receive
    what they add to their own half, more ranks all parts."""
    shard = full / ranks
    return Scattered(full, shard) if gloo and ranks > 2 else Scattered(shard, 0.0)


def copied(full: float, ranks: int, gloo: bool) -> float:
    """Bytes beside `full` while that is summed in place among `ranks`."""
    return full if gloo and ranks == 2 and full <= EXCHANGE_BYTES else 0.0
