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
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trigrid.errors import Problem, Refused, RunFailed
from trigrid.launch.place import LOOPBACK, RUN_DIR_VARIABLE
from trigrid.spec.job import Job
from trigrid.train.failure import first_failure

# Each rank on a CPU takes some 0.4 GiB and seconds of start-up.
RANKS_PER_CORE = 16


def check_room(job: Job) -> None:
    """Raise Refused where this machine cannot start as many processes as `job` has ranks."""
    room = max(torch.cuda.device_count(), (os.cpu_count() or 1) * RANKS_PER_CORE)
    if job.parallel.world > room:
        reason = f"this machine starts at most {room} ranks; torchrun or srun start more, on several nodes"
        raise Refused([Problem("world", job.parallel.world, reason)])


def run_local(job: Job, arguments: Sequence[str], run_dir: Path) -> None:
    """Run `python -m trigrid ARGUMENTS` as every rank of `job`; rank 0 speaks on this console, all others in their
    logs.

    Raises what the first rank to fail had to say, after all others have been ended.
    """
    ranks = job.parallel.world
    os.environ[RUN_DIR_VARIABLE] = str(run_dir)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # Ranks of one machine need no other network; a host name that does not resolve must not stop them.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    # A random.py in the user's folder must not stand in for the library's.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # The agent's own account of a failure would come before ours and says less.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(str(logs), redirects={rank: Std.ALL for rank in range(1, ranks)}),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trigrid", *arguments)
    except ChildFailedError as error:
        raise first_failure(run_dir, {rank: f.exitcode for rank, f in error.failures.items()}) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise RunFailed(f"stopped by {error.sigval.name}") from None
    finally:
        # It is for the ranks; this process speaks for itself again.
        del os.environ[RUN_DIR_VARIABLE]
