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


class Scattered(NamedTuple):
    """Bytes of a reduce-scatter beside what it reads. arriving: while it is under way; summed: what is made of them at
    its end, and is there beside them for a moment, where what arrives is not the result yet."""

    arriving: float
    summed: float


def scattered(full: float, ranks: int, exchanges: bool) -> Scattered:
    """Of a reduce-scatter of `full` bytes among `ranks`; exchanges: as in `Kernels`."""
    shard = full / ranks
    return Scattered(full, shard) if exchanges else Scattered(shard, 0.0)
