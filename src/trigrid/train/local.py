"""All ranks of a job on this machine, under torchrun's agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from trigrid.errors import Problem, Refused, RunFailed, TrigridError
from trigrid.launch.place import LOOPBACK, RUN_DIR_VARIABLE
from trigrid.report.console import Console
from trigrid.report.events import EventLog
from trigrid.spec.job import Job
from trigrid.train.agent import Agent
from trigrid.train.failure import culprit, first_failure, forget
from trigrid.train.machine import check_compiler
from trigrid.train.stopping import Preempted, read_marker, unmark

# Each rank on a CPU takes some 0.4 GiB and seconds of start-up.
RANKS_PER_CORE = 16
LOCAL_ADDRESS = "127.0.0.1"
MONITOR_S = 0.1


def check_room(job: Job) -> None:
    """Raise Refused where this machine cannot start as many processes as `job` has ranks, or not compile for them."""
    room = max(torch.cuda.device_count(), (os.cpu_count() or 1) * RANKS_PER_CORE)
    if job.parallel.world > room:
        reason = f"this machine starts at most {room} ranks; torchrun or srun start more, on several nodes"
        raise Refused([Problem("world", job.parallel.world, reason)])
    check_compiler(job, torch.device("cuda" if job.run.device != "cpu" and torch.cuda.is_available() else "cpu"))


def run_local(job: Job, arguments: Sequence[str], run_dir: Path, console: Console, max_restarts: int) -> None:
    """Run `python -m trigrid ARGUMENTS` as every rank of `job`, as `run_ranks` does."""
    ranks = job.parallel.world
    os.environ[RUN_DIR_VARIABLE] = str(run_dir)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # Ranks of one machine need no other network; a host name that does not resolve must not stop them.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    # A random.py in the user's folder must not stand in for the library's.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        program = (sys.executable, "-m", "trigrid", *arguments)
        marker = run_ranks(program, ranks, run_dir, job.faults.grace_s, console, max_restarts)
    finally:
        # It is for the ranks; this process speaks for itself again.
        del os.environ[RUN_DIR_VARIABLE]
    if marker is not None:
        console.say(_stopped(marker, run_dir))


def run_ranks(
    program: Sequence[str], ranks: int, run_dir: Path, grace_s: float, console: Console, max_restarts: int
) -> Preempted | None:
    """Run `program` as every rank; rank 0 speaks on this console, all others in their logs. After a failure that is not
    a mistake of the user all start again, up to `max_restarts` times.

    Returns how the run was stopped, if it was told to stop and has left word of that, else None at its end. Raises what
    the first rank to fail in the last attempt had to say, after all others have been ended.
    """
    # The agent's own account of a failure would come before ours and says less.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    meeting = get_rendezvous_handler(
        RendezvousParameters("c10d", "localhost:0", uuid4().hex, 1, 1, local_addr=LOCAL_ADDRESS)
    )
    spec = WorkerSpec(
        role="trainer",
        local_world_size=ranks,
        entrypoint=program[0],
        args=tuple(program[1:]),
        rdzv_handler=meeting,
        max_restarts=max_restarts,
        monitor_interval=MONITOR_S,
        local_addr=LOCAL_ADDRESS,
    )
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    redirects = {rank: Std.ALL for rank in range(1, ranks)}
    attempts = _Attempts(run_dir, ranks, console)
    agent = Agent(spec, DefaultLogsSpecs(str(logs), redirects=redirects), grace_s, attempts.starts, attempts.failed)
    try:
        result = agent.run()
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise RunFailed(f"stopped by {error.sigval.name}") from None
    finally:
        meeting.shutdown()
    if (marker := read_marker(run_dir)) is not None:
        return marker
    if agent.overdue:
        raise RunFailed(f"told to stop by {agent.told}, the ranks did not end in faults.grace_s and were killed")
    if result.is_failed():
        raise attempts.failure
    return None


class _Attempts:
    """What is told of the attempts of a run, on the console and in its events."""

    def __init__(self, run_dir: Path, world: int, console: Console) -> None:
        self._run_dir, self._world, self._console = run_dir, world, console
        self._events = EventLog(run_dir)
        self.failure: TrigridError = RunFailed("the ranks could not be started")

    def starts(self, attempt: int) -> None:
        forget(self._run_dir)
        unmark(self._run_dir)
        self._events.write("launch", world=self._world, restart=attempt)

    def failed(self, codes: dict[int, int], seen_s: float, another: bool) -> bool:
        """Note why; True where the ranks are to start again."""
        self.failure = first_failure(self._run_dir, codes)
        reason = str(self.failure).splitlines()[0]
        rank, number = culprit(self._run_dir, codes)
        name = signal.Signals(number).name if number else None
        self._events.write("failed", rank=rank, reason=reason, signal=name, detected_s=seen_s)
        again = another and isinstance(self.failure, RunFailed)
        if again:
            self._console.warn(f"{reason}; all ranks start again from the last complete checkpoint")
        return again


def _stopped(marker: Preempted, run_dir: Path) -> str:
    """What a person is told of a run that was stopped."""
    by = marker.signal or "a signal"
    if marker.checkpoint is None:
        return f"stopped by {by} after step {marker.step}, with no checkpoint to go on from"
    # The run's own job has what flags have changed.
    again = f"trigrid train {run_dir / 'job.toml'} --resume {run_dir}"
    return f"stopped by {by} after step {marker.step}; checkpoint {marker.checkpoint}; go on with: {again}"
