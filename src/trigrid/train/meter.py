"""Where the time of the steps goes, and the memory they take, on all ranks together."""

from __future__ import annotations

import time

import torch

from trigrid.engine.comm import Comm
from trigrid.report.metrics import Interval
from trigrid.train.machine import peak_memory_bytes


class Meter:
    """A step is `begin`, `loaded` once its data is there, `end`. `read` gives the steps since it was last called, and
    is to be called by all ranks at the same step."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._begun_s = self._seconds = self._data_wait_s = 0.0
        self._steps = 0

    def begin(self) -> None:
        self._begun_s = time.perf_counter()

    def loaded(self) -> None:
        self._data_wait_s += time.perf_counter() - self._begun_s

    def end(self) -> float:
        """The step's seconds on this rank."""
        seconds = time.perf_counter() - self._begun_s
        self._seconds += seconds
        self._steps += 1
        return seconds

    def read(self) -> Interval:
        mine = [self._seconds, self._data_wait_s, float(peak_memory_bytes(self._device))]
        worst = torch.tensor(mine, dtype=torch.float64, device=self._device)
        seconds, data_wait_s, peak_bytes = self._comm.read(self._comm.all_reduce(worst, "world", "max"))
        interval = Interval(self._steps, seconds, data_wait_s, int(peak_bytes))
        self._steps, self._seconds, self._data_wait_s = 0, 0.0, 0.0
        return interval
