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


def join(place: Place, device: torch.device) -> None:
    """Meet the other ranks. Raises RunFailed where the meeting point cannot be had."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    os.environ.setdefault("MASTER_ADDR", place.address)
    os.environ.setdefault("MASTER_PORT", str(place.port))
    method = "env://" if place.launcher == "torchrun" else f"tcp://{place.address}:{place.port}"
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=method,
            rank=place.rank,
            world_size=place.world,
        )
    except dist.DistError as error:
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
