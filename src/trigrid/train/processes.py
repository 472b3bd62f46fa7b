"""Joining the other ranks of a job."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist

from trigrid.errors import Problem, Refused, RunFailed
from trigrid.launch.place import Place
from trigrid.spec.job import Job

PARENT_POLL_S = 0.5


def choose_device(job: Job, local_rank: int, local_world: int) -> torch.device:
    """The device of this rank; "auto" takes GPUs only where there is one for each local rank."""
    gpus = torch.cuda.device_count()
    if job.run.device == "cuda" and gpus < local_world:
        reason = f"this node has {gpus} CUDA devices for {local_world} ranks"
        raise Refused([Problem("run.device", "cuda", reason, ("cpu",))])
    if job.run.device == "cpu" or gpus < local_world:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join(place: Place, device: torch.device) -> None:
    """Meet the other ranks. Raises RunFailed where the meeting point cannot be had."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    method = "env://" if place.launcher == "torchrun" else f"tcp://{place.address}:{place.port}"
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=method,
            rank=place.rank,
            world_size=place.world,
            # No device_id: with one, NCCL groups are split from the world, which every rank would have to take part in.
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise RunFailed(
                f"MASTER_PORT = {place.port}: the port is in use on {place.address}; "
                f"give another, for example MASTER_PORT={place.port + 1}"
            ) from None
        raise RunFailed(f"rank {place.rank} does not reach {place.address}:{place.port}: {error}") from None


def _end_with_parent(parent: int) -> None:
    """A launcher that is killed outright cannot end its ranks, so they end themselves."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)
