"""Joining the other ranks of a job."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trigrid.errors import Problem, Refused, RunFailed
from trigrid.launch.place import Place, restarts_of
from trigrid.spec.job import Faults, Job
from trigrid.train.failure import give_up

PARENT_POLL_S = 0.5
MARGIN_S = 120.0
"""Between the longest limit of the watchdog and torch's own, which says less."""


def torch_timeout(faults: Faults) -> timedelta:
    """After which a call that waits for other ranks fails by itself: only where the watchdog did not end the run."""
    limits = (faults.start_s, faults.first_step_s, faults.step_s, faults.checkpoint_s)
    return timedelta(seconds=max(limits) + MARGIN_S)


@contextmanager
def start_limit(place: Place, faults: Faults) -> Iterator[None]:
    """End this process where the body of the `with`, in which it meets the others, takes longer than faults.start_s. No
    watchdog can watch yet: it needs the folder of the run, which ranks learn from each other."""
    message = (
        f"rank {place.rank} of {place.world} did not meet all others within {faults.start_s:g} s (faults.start_s): "
        f"some have not started, or still prepare the data, or do not reach {place.address}:{place.port}"
    )
    # A call that fails by itself at the limit says more.
    timer = threading.Timer(faults.start_s + 1, give_up, (place.rank, message, None))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def choose_device(job: Job, local_rank: int, local_world: int) -> torch.device:
    """The device of this rank: a GPU of its own, unless the job asks for the CPU or, under "auto", there is no GPU.

    One visible device is taken for this rank's own where the launcher gives each rank its own (`CUDA_VISIBLE_DEVICES`).
    Raises Refused where there are too few: a rank that fell back to the CPU would train at a hundredth of the speed.
    """
    gpus = torch.cuda.device_count() if job.run.device != "cpu" else 0
    if job.run.device == "cpu" or (job.run.device == "auto" and gpus == 0):
        return torch.device("cpu")
    own = gpus == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus < local_world and not own:
        reason = f"this node has {gpus} CUDA devices for {local_world} ranks"
        raise Refused([Problem("run.device", job.run.device, reason, ("cpu",))])
    index = 0 if own else local_rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join(place: Place, device: torch.device, faults: Faults) -> None:
    """Meet the other ranks. Raises RunFailed where the meeting point cannot be had, or is not reached in time; to be
    called within `start_limit`, which also ends where another rank does not come."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    os.environ.setdefault("MASTER_ADDR", place.address)
    os.environ.setdefault("MASTER_PORT", str(place.port))
    method = "env://" if place.launcher == "torchrun" else f"tcp://{place.address}:{place.port}"
    limit = timedelta(seconds=faults.start_s)
    try:
        # A store of our own, since torch has one time limit for meeting and for all that comes later.
        store, rank, world = next(rendezvous(method, place.rank, place.world, timeout=limit))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(_attempt(), store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world,
            timeout=torch_timeout(faults),
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise RunFailed(
                f"MASTER_PORT = {place.port}: the port is in use on {place.address}; "
                f"give another, for example MASTER_PORT={place.port + 1}"
            ) from None
        raise RunFailed(
            f"rank {place.rank} does not meet the others at {place.address}:{place.port} (within faults.start_s = "
            f"{faults.start_s:g} s): {str(error).splitlines()[0]}"
        ) from None


def _attempt() -> str:
    """A prefix for the keys of this attempt: torchrun has one store for all attempts, in which ranks of an earlier one
    still have addresses, which nobody answers at.

    Agents of several nodes do not count alike (pytorch#135712), so their ranks cannot go by that. There each attempt
    has a store of its own where TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set for torchrun.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return f"attempt {restarts_of(os.environ)}" if alone else "attempt"


def _end_with_parent(parent: int) -> None:
    """A launcher that is killed outright cannot end its ranks, so they end themselves."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)
