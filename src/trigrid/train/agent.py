"""torchrun's agent for the ranks of one machine, with what a run needs beyond it.

torch's own ends the others with SIGTERM when one has failed, which for a rank means to save a checkpoint, and kills
them after half a minute. Here they are killed after WORD_S, and SIGTERM is left to those who take the machine away.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from trigrid.train.stopping import SIGNALS

WORD_S = 2.0
"""What ranks have to leave word of their own after the first has failed."""
POLL_S = 0.05
MARGIN_S = 5.0
"""Ranks that are told to stop end themselves after their time of grace; those that cannot have this much more."""

Started = Callable[[int], None]
"""Called with the number of the attempt, from 0, before its ranks start."""
Failed = Callable[[dict[int, int], float, bool], bool]
"""Called when ranks have failed: rank → exit code (a signal as its number below zero) of those that ended badly before
any was killed from here, at most how many seconds after the first end that was seen, and whether another attempt is
left; returns whether to make it."""


class Agent(LocalElasticAgent):
    """Starts the ranks of `spec`, forwards signals to stop to them, and starts them again after a failure."""

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, grace_s: float, started: Started, failed: Failed) -> None:
        super().__init__(spec, logs)
        self._grace_s, self._started, self._failed = grace_s, started, failed
        self._looked_s = 0.0
        self._told: list[int] = []
        self._forwarded = 0
        self._deadline_s: float | None = None
        self.overdue = False

    def run(self, role: str = "trainer") -> RunResult:
        # torch's own handlers would end the ranks at once.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
        before = {number: signal.signal(number, lambda number, _: self._told.append(number)) for number in SIGNALS}
        try:
            result: RunResult = super().run(role)
            return result
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def told(self) -> str | None:
        """The signal that told this run to stop, if one did."""
        return signal.Signals(self._told[0]).name if self._told else None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._started(worker_group.spec.max_restarts - self._remaining_restarts)
        self._forwarded = 0
        # Until their own handlers stand, these would end them; what is sent meanwhile, they get then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._looked_s = time.monotonic()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._ranks(worker_group)
        self._forward(ranks)
        seen_s = time.monotonic() - self._looked_s
        self._looked_s = time.monotonic()
        if _bad_ends(ranks):
            self._end_all(ranks, seen_s)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _ranks(self, worker_group: WorkerGroup) -> dict[int, subprocess.Popen[bytes]]:
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        return {worker_group.workers[local].global_rank: handler.proc for local, handler in handlers.items()}

    def _forward(self, ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
        """Tell the ranks what this process was told, each signal once, and kill them when they have had their time."""
        for number in self._told[self._forwarded :]:
            for process in ranks.values():
                process.send_signal(number)
            self._forwarded += 1
            # No attempt follows one that was stopped.
            self._remaining_restarts = 0
            self._deadline_s = self._deadline_s or time.monotonic() + self._grace_s + MARGIN_S
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            self.overdue = True
            _kill(ranks)

    def _end_all(self, ranks: Mapping[int, subprocess.Popen[bytes]], seen_s: float) -> None:
        deadline_s = time.monotonic() + WORD_S
        while time.monotonic() < deadline_s and any(process.poll() is None for process in ranks.values()):
            time.sleep(POLL_S)
        codes = _bad_ends(ranks)
        _kill(ranks)
        if not self._failed(codes, seen_s, self._remaining_restarts > 0):
            self._remaining_restarts = 0


def _bad_ends(ranks: Mapping[int, subprocess.Popen[bytes]]) -> dict[int, int]:
    """Exit codes of the ranks that have ended with another than zero."""
    codes = {rank: process.poll() for rank, process in ranks.items()}
    return {rank: code for rank, code in codes.items() if code}


def _kill(ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Each rank that runs, with what it has started."""
    for process in ranks.values():
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
