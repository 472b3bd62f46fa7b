"""What can be said of one node alone: what is installed, its limits, its memory, its NICs, its disk."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist

import trigrid
from trigrid.check.doctor_gpus import ask_nvlink, judge_nvlink, read_nvlink
from trigrid.errors import Refused
from trigrid.plan.long_run import checkpoint_cost
from trigrid.plan.plan import make_plan
from trigrid.report.doctor import Finding
from trigrid.report.units import size
from trigrid.spec.job import Job

FEWEST_FILES = 4096
"""Open files of a process, besides a socket to each other rank: its checkpoints and token files."""
SHM_BYTES = 2**30
"""NCCL keeps buffers of ranks of one node there; the 64 MiB of a container are too few."""
CHUNK, SYNC_CHUNKS, DISK_S, DISK_BYTES = 2**22, 4, 1.5, 2**31
FREE_SHARE = 0.95
KEPT = 2
"""Checkpoints that are there at once, at least."""
INFINIBAND, NETWORK = Path("/sys/class/infiniband"), Path("/sys/class/net")


def versions(device: str) -> dict[str, str]:
    """What must be the same on all nodes."""
    found = {"trigrid": trigrid.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if device == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        with suppress(OSError, IndexError):
            found["driver"] = Path("/proc/driver/nvidia/version").read_text().split("  ")[1].strip()
    else:
        found["gloo"] = "with torch" if dist.is_gloo_available() else "none"
    with suppress(PackageNotFoundError):
        found["numpy"] = version("numpy")
    return found


def look_at_host(host: str, device: str, local_world: int, world: int) -> list[Finding]:
    """Findings of this node, on which `local_world` ranks of `world` run on "cuda" or "cpu"."""
    found = [*_processor(device, local_world), *_limits(device, world), _shared_memory(device, local_world)]
    found += [*_gpu_memory(local_world), *_nvlink(host)] if device == "cuda" else []
    found += [*_nics(device)]
    return [Finding(**{**finding.__dict__, "where": (host,)}) for finding in found]


def _processor(device: str, local_world: int) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    few = cores < local_world
    yield Finding(
        what="cores",
        verdict="wrong" if few and device == "cuda" else "told" if few else "sound",
        measured=f"{cores} for {local_world} rank{'s' if local_world > 1 else ''}",
        expected="one for each rank",
        advice="ranks take turns, and none is as fast as it could be: ask for more cores, or start fewer ranks",
        value=float(cores),
        usual=float(local_world),
        unit="cores",
    )
    if device == "cpu":
        yield Finding(what="GPU", verdict="not here", measured="ranks run on CPUs")
    with suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        there, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        yield Finding(what="memory", verdict="told", measured=f"{size(free)} free of {size(there)}", value=float(free))


def _limits(device: str, world: int) -> Iterator[Finding]:
    fewest = FEWEST_FILES + world
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # ulimit -n unlimited
    enough = files == resource.RLIM_INFINITY or files >= fewest
    yield Finding(
        what="ulimit: open files",
        verdict="sound" if enough else "wrong",
        measured="unlimited" if files == resource.RLIM_INFINITY else f"{files:,}",
        expected=f"at least {fewest:,}",
        advice=f"ulimit -n {max(65_536, fewest)} before the launch, or nofile in /etc/security/limits.conf",
        value=float(files),
        usual=float(fewest),
        unit="files",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    needed = device == "cuda" and INFINIBAND.is_dir()
    yield Finding(
        what="ulimit: locked memory",
        verdict="sound" if unlimited else "wrong" if needed else "told",
        measured="unlimited" if unlimited else size(locked),
        expected="unlimited, for RDMA" if needed else "",
        advice="memlock = unlimited in limits.conf, or for the scheduler: RDMA locks its buffers" if needed else "",
    )


def _shared_memory(device: str, local_world: int) -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding(what="/dev/shm", verdict="not here", measured="there is none")
    there = os.statvfs(path)
    free = there.f_bavail * there.f_frsize
    needed = device == "cuda" and local_world > 1
    return Finding(
        what="/dev/shm",
        verdict="wrong" if needed and free < SHM_BYTES else "sound" if needed else "told",
        measured=f"{size(free)} free",
        expected=f"at least {size(SHM_BYTES)}" if needed else "",
        advice="give the container more: docker --shm-size=8g, or a mount of an emptyDir in memory" if needed else "",
        value=float(free),
        usual=float(SHM_BYTES),
        unit="B",
    )


def _gpu_memory(local_world: int) -> Iterator[Finding]:
    for index in range(min(local_world, torch.cuda.device_count())):
        free, there = torch.cuda.mem_get_info(index)
        yield Finding(
            what=f"GPU {index} memory",
            verdict="sound" if free > FREE_SHARE * there else "wrong",
            measured=f"{size(free)} free of {size(there)}",
            expected=f"more than {FREE_SHARE:.0%} free",
            advice="another process is on it: nvidia-smi names it",
            value=float(free),
            usual=FREE_SHARE * there,
            unit="B",
        )


def _nvlink(host: str) -> Iterator[Finding]:
    text = ask_nvlink().answer()
    if text is None:
        yield Finding(what="NVLink", verdict="not here", measured="nvidia-smi says nothing of it")
    else:
        yield from judge_nvlink(read_nvlink(text), host)


def _nics(device: str) -> Iterator[Finding]:
    ports = sorted(INFINIBAND.glob("*/ports/*")) if INFINIBAND.is_dir() else []
    if not ports:
        yield Finding(what="InfiniBand, RoCE", verdict="not here", measured="no port in /sys/class/infiniband")
    states = {port: _word(port / "state").rpartition(": ")[2] for port in ports}
    for port, state in states.items():
        name, up = f"{port.parts[-3]}:{port.name}", state == "ACTIVE"
        yield Finding(
            what=f"NIC {name}",
            verdict="sound" if up else "wrong" if "ACTIVE" in states.values() else "not here",
            measured=f"{state}, {_word(port / 'rate')}, {_word(port / 'link_layer')}",
            expected="ACTIVE",
            advice="its cable, its switch port, or the subnet manager: ibstat, ibdiagnet",
        )
    if ports and device == "cuda" and "nvidia_peermem" not in _word(Path("/proc/modules"), whole=True):
        yield Finding(
            what="GPUDirect RDMA",
            verdict="told",
            measured="nvidia_peermem is not loaded",
            advice="modprobe nvidia_peermem, unless the driver has dma-buf: NCCL_DEBUG=INFO says GDRDMA then",
        )
    for card in sorted(NETWORK.glob("*")) if NETWORK.is_dir() else []:
        if card.name != "lo" and _word(card / "operstate") == "up":
            speed = _word(card / "speed")
            rate = f"{int(speed) / 1000:g} Gb/s, " if speed.isdecimal() and int(speed) > 0 else ""
            yield Finding(what=f"NIC {card.name}", verdict="told", measured=f"up, {rate}MTU {_word(card / 'mtu')}")


def _word(path: Path, whole: bool = False) -> str:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return text if whole else text.strip()


def look_at_disk(folder: Path, host: str, nodes: int, job: Job | None) -> list[Finding]:
    """How fast this node, one of `nodes`, writes where runs are kept, and whether checkpoints have room there."""
    what = f"disk of {folder}"
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    # Never under a name that another rank may use.
    path = there / f".trigrid-doctor-{host}-{os.getpid()}"
    try:
        written, spent_s = _write(path)
    except OSError as error:
        advice = "give run.out a folder that all nodes can write to"
        measured = f"{there}: {error.strerror}"
        return [Finding(what=what, verdict="wrong", measured=measured, advice=advice, where=(host,))]
    finally:
        path.unlink(missing_ok=True)
    rate, needed, limit_s = written / spent_s, _checkpoint_bytes(job), job.faults.checkpoint_s if job else inf
    write_s, free = needed / nodes / rate, shutil.disk_usage(there).free
    speed = Finding(
        what=what,
        verdict="wrong" if write_s > limit_s else "sound" if needed else "told",
        measured=f"{rate / 1e9:.2g} GB/s written and synced" + (f", a checkpoint in {write_s:.2g} s" if needed else ""),
        expected=f"a checkpoint within {limit_s:g} s (faults.checkpoint_s)" if needed else "",
        advice="the run would be ended for its checkpoints: choose another file system for run.out" if needed else "",
        where=(host,),
        value=rate,
        unit="B/s",
    )
    room = Finding(
        what="room for checkpoints",
        verdict="sound" if free > KEPT * needed else "wrong",
        measured=f"{size(free)} free",
        expected=f"{KEPT} of {size(round(needed))}",
        advice="a checkpoint is complete before an older one is removed: make room, or choose another run.out",
        where=(host,),
        value=float(free),
        usual=KEPT * needed,
        unit="B",
    )
    return [speed, room] if needed else [speed]


def _write(path: Path) -> tuple[int, float]:
    """Bytes written and synced, and in how long."""
    chunk, written = os.urandom(CHUNK), 0
    with path.open("wb", buffering=0) as file:
        begun = time.perf_counter()
        while written < DISK_BYTES and time.perf_counter() - begun < DISK_S:
            written += sum(file.write(chunk) for _ in range(SYNC_CHUNKS))
            os.fsync(file.fileno())
        return written, time.perf_counter() - begun


def _checkpoint_bytes(job: Job | None) -> float:
    if job is None:
        return 0.0
    try:
        return checkpoint_cost(make_plan(job)).bytes
    except Refused:
        # What cannot be planned can be trained all the same.
        return 0.0
