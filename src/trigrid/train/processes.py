"""Joining the other ranks of a job."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trigrid.errors import Problem, Refused, RunFailed
from trigrid.launch.interface import interface_to
from trigrid.launch.place import Place
from trigrid.launch.seats import Seat, seat_of
from trigrid.spec.job import Faults, Job
from trigrid.train.failure import give_up

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun where its first agent keeps the store in which ranks meet."""
PARENT_POLL_S = 0.5
RESOLVE_S = 10.0
"""A name may be known only a little later, as in Kubernetes."""
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


def seat_here(job: Job, place: Place) -> Seat:
    """Where this rank runs, on what, and what stands against it."""
    gpus, own = _gpus(job)
    trouble = _lack(job, place, gpus, own)
    on_cpu = trouble or _on_cpu(job, gpus)
    name = "cpu" if on_cpu else torch.cuda.get_device_name(0 if own else place.local_rank)
    return seat_of(os.environ, place.rank, name, trouble)


def choose_device(job: Job, place: Place) -> torch.device:
    """The device of this rank: a GPU of its own, unless the job asks for the CPU or, under "auto", there is no GPU.

    One visible device is taken for this rank's own where the launcher gives each rank its own (`CUDA_VISIBLE_DEVICES`).
    Raises Refused where there are too few: a rank that fell back to the CPU would train at a hundredth of the speed.
    """
    gpus, own = _gpus(job)
    if lack := _lack(job, place, gpus, own):
        raise Refused([Problem("run.device", job.run.device, lack, ("cpu",))])
    if _on_cpu(job, gpus):
        return torch.device("cpu")
    index = 0 if own else place.local_rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _on_cpu(job: Job, gpus: int) -> bool:
    return job.run.device == "cpu" or (job.run.device == "auto" and gpus == 0)


def _lack(job: Job, place: Place, gpus: int, own: bool) -> str:
    return "" if _on_cpu(job, gpus) or own else too_few(place, gpus)


def too_few(place: Place, gpus: int) -> str:
    """What this node lacks for its ranks, or nothing."""
    return f"this node has {gpus} CUDA devices for {place.local_world} ranks" if gpus < place.local_world else ""


def _gpus(job: Job) -> tuple[int, bool]:
    """How many CUDA devices this process sees, and whether that is one which its launcher has given to it alone."""
    gpus = torch.cuda.device_count() if job.run.device != "cpu" else 0
    return gpus, gpus == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


def open_store(place: Place, faults: Faults) -> Store:
    """The store in which ranks meet, kept by the first one, or by its launcher for all attempts (`attempt.gather`).
    Raises RunFailed where its address or port cannot be had, or is not reached in time."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    os.environ.setdefault("MASTER_ADDR", place.address)
    os.environ.setdefault("MASTER_PORT", str(place.port))
    _resolve(place)
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_to(place.address, place.port)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    agents = place.launcher == "torchrun" and os.environ.get(AGENTS_STORE) == str(True)
    try:
        # Of our own, since torch has one time limit for meeting and for all that comes later, and does not say who is
        # missing where it waits for all.
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            place.address,
            place.port,
            is_master=place.rank == 0 and not agents,
            timeout=timedelta(seconds=faults.start_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise _not_met(place, faults, error) from None
    return store


def _resolve(place: Place) -> None:
    """torch would try a name that nobody knows until the time to start is over."""
    deadline_s = time.monotonic() + RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(place.address, place.port)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline_s:
                raise RunFailed(
                    f"MASTER_ADDR = {place.address}: {socket.gethostname()} does not know this name "
                    f"({error.strerror}); set it to an address of the first rank's node that all nodes reach"
                ) from None
            time.sleep(1.0)


def join(place: Place, device: torch.device, faults: Faults, store: Store) -> None:
    """Join the other ranks in the store of this attempt. Raises RunFailed as `open_store`; to be called within
    `start_limit`, which also ends where another rank does not come."""
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=torch_timeout(faults),
        )
    except dist.DistError as error:
        raise _not_met(place, faults, error) from None


def _not_met(place: Place, faults: Faults, error: Exception) -> RunFailed:
    if "EADDRINUSE" in str(error) or "already in use" in str(error):
        return RunFailed(
            f"MASTER_PORT = {place.port}: the port is in use on {place.address}; "
            f"give another, for example MASTER_PORT={place.port + 1}"
        )
    return RunFailed(
        f"rank {place.rank} does not meet the others at {place.address}:{place.port} (within faults.start_s = "
        f"{faults.start_s:g} s): {str(error).splitlines()[0]}"
    )


def _end_with_parent(parent: int) -> None:
    """A launcher that is killed outright cannot end its ranks, so they end themselves."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)
