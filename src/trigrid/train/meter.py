"""Where the time of the steps goes, and the memory they take, on all ranks together."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch

from trigrid.engine.comm import Comm
from trigrid.report.metrics import Interval, Slowest
from trigrid.train.machine import peak_memory_bytes


class Meter:
    """A step is `begin`, `loaded` once its data is there, `end`. `read` gives the steps since it was last called, and
    is to be called by all ranks at the same step."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._begun_s = self._seconds = self._data_wait_s = self._waited_s = 0.0
        self._steps = 0

    def begin(self) -> None:
        self._comm.waited_s = 0.0
        self._begun_s = time.perf_counter()

    def loaded(self) -> float:
        """The seconds that the step has waited for its data."""
        seconds = time.perf_counter() - self._begun_s
        self._data_wait_s += seconds
        return seconds

    def end(self) -> float:
        """The step's seconds on this rank."""
        seconds = time.perf_counter() - self._begun_s
        self._seconds += seconds
        self._waited_s += self._comm.waited_s
        self._steps += 1
        return seconds

    def read(self) -> Interval:
        mine = [self._seconds, self._data_wait_s, float(peak_memory_bytes(self._device))]
        worst = torch.tensor(mine, dtype=torch.float64, device=self._device)
        seconds, data_wait_s, peak_bytes = self._comm.read(self._comm.all_reduce(worst, "world", "max"))
        interval = Interval(self._steps, seconds, data_wait_s, int(peak_bytes), self._slowest())
        self._steps, self._seconds, self._data_wait_s, self._waited_s = 0, 0.0, 0.0, 0.0
        return interval

    def _slowest(self) -> Slowest | None:
        """Who is waited for; on CUDA the host, which does not wait itself, cannot tell."""
        if self._device.type == "cuda" or self._comm.grid.world == 1:
            return None
        busy = torch.zeros(self._comm.grid.world, dtype=torch.float64)
        busy[self._comm.rank] = self._seconds - self._data_wait_s - self._waited_s
        return busiest(self._comm.read(self._comm.all_reduce(busy, "world")), self._comm.grid.stages)


def busiest(busy_s: Sequence[float], stages: Sequence[int]) -> Slowest | None:
    """The rank that is busy longest compared with the median of its pipeline stage; None where no stage has three
    ranks, since those of different stages have different work."""
    by_stage: dict[int, list[float]] = defaultdict(list)
    for seconds, stage in zip(busy_s, stages, strict=True):
        by_stage[stage].append(seconds)
    usual = {stage: median(peers) for stage, peers in by_stage.items() if len(peers) > 2}
    compared = [rank for rank, stage in enumerate(stages) if usual.get(stage)]
    if not compared:
        return None
    rank = max(compared, key=lambda rank: busy_s[rank] / usual[stages[rank]])
    return Slowest(rank, busy_s[rank], usual[stages[rank]])
