"""`trigrid calibrate`: measures the machine or the cluster that it runs on, for the planner.

Every rank measures at once, as every rank computes at once when training: ranks that share cores share their rate.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from trigrid.check.calibrate_combine import Sweep, combined
from trigrid.check.calibrate_kernels import (
    ALONE,
    DTYPES,
    heads_of,
    measure_attention,
    measure_launch,
    measure_passes,
    measure_products,
    measure_start,
    products_of,
    usual,
)
from trigrid.check.calibrate_meter import Meter, Progress
from trigrid.check.calibrate_network import measure_overlap, measure_wires
from trigrid.check.calibrate_operations import measure_operations
from trigrid.check.pool import Pool
from trigrid.engine.comm import Comm
from trigrid.engine.matmul import matmul_precision
from trigrid.errors import Problem, Refused
from trigrid.grid import Grid
from trigrid.launch.place import Place
from trigrid.plan.measured import Measured, Products
from trigrid.report.console import Console
from trigrid.spec.cluster import Cluster, Tier
from trigrid.spec.gpu import Gpu, gpus
from trigrid.spec.job import Faults, Job, MatmulPrecision
from trigrid.spec.layout import Layout
from trigrid.train.attempt import gather
from trigrid.train.processes import join, open_store, start_limit

# Machines are not always as fast: everything is measured several times, far apart, if that takes not much longer than
# was asked for.
SWEEPS, LONGER = 3, 1.5
# How the seconds of a sweep are shared out.
SHARES = {
    "launch": 0.06,
    "passes": 0.04,
    "operations": 0.11,
    "products": 0.29,
    "attention": 0.12,
    "wires": 0.31,
    "overlap": 0.07,
}
# A CPU has no context of CUDA, NCCL and their kernels, and no GPU's fixed cost of a step; and what is measured of its
# products is what eager torch does with them.
OF_A_CPU = {
    **{f"memory.{name}_bytes": 0.0 for name in ("context", "communicator", "pair", "workspace")},
    "memory.context_bytes_early": 0.0,
    **{f"products.{name}": 1.0 for name in ("early", "deepspeed", "eager", "fused")},
    **{f"step.{name}": 0.0 for name in ("early", "deepspeed", "eager", "fused")},
}
PRESUMED_NIC_BPS = 1.25e9


@dataclass(frozen=True)
class Order:
    """What to measure. layouts: whose groups are tried, of the world's size each; empty: all ranks of a node together,
    and ranks of different nodes. nodes_per_leaf: as in Cluster. command: how it was asked for."""

    seconds: float
    formats: tuple[str, ...]
    device: str = "cpu"
    job: Job | None = None
    layouts: tuple[Layout, ...] = ()
    nodes_per_leaf: int = 32
    command: str = ""

    @property
    def matmul_precision(self) -> MatmulPrecision:
        """The job's."""
        return self.job.run.matmul_precision if self.job else "highest"


def calibrate_local(order: Order, processes: int, console: Console) -> Measured:
    """As that many processes of this machine, joined by gloo, or in this process alone."""
    if processes == 1:
        with console.progress() as progress:
            return calibrate_rank(order, 0, 1, 1, _device(order, 0), progress)
    with Pool(processes, timeout_s=10 * order.seconds + 300) as pool, console.waiting("calibrating"):
        return pool.run(_in_pool, processes, order, processes)[0]


def _in_pool(rank: int, order: Order, world: int) -> Measured:
    return calibrate_rank(order, rank, world, world, torch.device("cpu"), lambda *_: None)


def _device(order: Order, local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if order.device == "cuda" else torch.device("cpu")


def calibrate_rank(
    order: Order, rank: int, world: int, local_world: int, device: torch.device, progress: Progress
) -> Measured:
    """As one of `world` ranks that have joined a process group; all get the same."""
    begun = time.perf_counter()
    cluster = Cluster(gpus_per_node=local_world, nodes_per_leaf=order.nodes_per_leaf)
    layouts = order.layouts or (Layout(tp=local_world, dp=world // local_world),)
    comms = [Comm(Grid(layout, cluster), rank, device) for layout in layouts] if world > 1 else []
    meter = Meter(device, comms[0] if comms else None, progress)
    with matmul_precision(order.matmul_precision):
        sweeps = [_sweep(order, layouts, comms, meter)]
        # Where a few calls of each point take longer than their share, there are fewer.
        while len(sweeps) < SWEEPS and _next_over_s(meter, begun, len(sweeps)) < LONGER * order.seconds:
            sweeps.append(_sweep(order, layouts, comms, meter))
        found = combined(sweeps)
    values = dict(OF_A_CPU) if device.type == "cpu" else {}
    if comms:
        values["overlap.slowdown"] = found.slowdown
    gpu, presumed = _accelerator(device, local_world, found)
    return Measured(
        about=_about(order, gpu.name, world, device, time.perf_counter() - begun),
        gpus_per_node=local_world,
        accelerator=gpu,
        presumed=presumed,
        products=found.products,
        attention=found.attention,
        passes=found.passes,
        operations=found.operations,
        launch=found.launch,
        wires=found.wires,
        values=values,
    )


def _next_over_s(meter: Meter, begun: float, done: int) -> float:
    """When the next sweep will be over, in seconds from the beginning, if it takes as long as those before."""
    return meter.agree(time.perf_counter() - begun) * (done + 1) / done


def _sweep(order: Order, layouts: Sequence[Layout], comms: list[Comm], meter: Meter) -> Sweep:
    """Everything once, in its part of the seconds."""
    seconds, formats, device = order.seconds / SWEEPS, order.formats, meter.device.type
    # Alone, there are no wires to spend time on.
    scale = seconds if comms else seconds / (1 - SHARES["wires"] - SHARES["overlap"])
    share = {name: part * scale for name, part in SHARES.items()}
    each = {name: share[name] / len(formats) for name in ("products", "attention", "operations")}
    start_s = measure_start(meter, share["launch"] / 3)
    alone = replace(order.job or usual(device), parallel=ALONE)
    shapes, heads = products_of(order.job, layouts, device), heads_of(order.job, device)
    return Sweep(
        launch=measure_launch(meter, share["launch"] * 2 / 3),
        passes=measure_passes(meter, share["passes"], start_s),
        products={name: measure_products(meter, shapes, name, each["products"], start_s) for name in formats},
        attention={name: measure_attention(meter, heads, name, each["attention"]) for name in formats},
        # A GPU's would be of the host, which starts each of their kernels.
        operations={name: measure_operations(meter, alone, DTYPES[name], each["operations"]) for name in formats}
        if device == "cpu"
        else {},
        wires=measure_wires(meter, comms, share["wires"]) if comms else (),
        slowdown=measure_overlap(meter, comms[0], share["overlap"]) if comms else 1.0,
    )


def _about(order: Order, name: str, world: int, device: torch.device, spent_s: float) -> dict[str, str | int | float]:
    return {
        "host": platform.node(),
        "date": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
        "device": device.type,
        "accelerator": name,
        "torch": torch.__version__,
        "backend": dist.get_backend() if world > 1 else "none",
        "ranks": world,
        "threads": torch.get_num_threads(),
        "matmul_precision": order.matmul_precision,
        "cores": os.cpu_count() or 1,
        "seconds": round(spent_s, 1),
        "command": order.command,
    }


def _accelerator(device: torch.device, local_world: int, found: Sweep) -> tuple[Gpu, tuple[str, ...]]:
    """The accelerator that was measured, and its fields that were not. Its peaks are the catalogue's where that knows
    it, else the best that was measured: then MFU is a share of that."""
    wires, passes = found.wires, found.passes
    near = [wire.link_Bps for wire in wires if wire.tier is Tier.NVLINK and wire.kind == "message"]
    far = [wire.link_Bps for wire in wires if wire.tier is not Tier.NVLINK and wire.kind == "message"]
    presumed = [key for key, there in (("nvlink_Bps", near), ("nic_Bps", far)) if not there]
    best = {name: max(_rates(p)) for name, p in found.products.items()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory, sms = properties.name, properties.total_memory, properties.multi_processor_count
        known = of_catalogue(name, memory)
        if known is not None:
            # fp8 and what else was not asked for stay as the catalogue says.
            return replace(known, hbm_bytes=memory), (*presumed, "power_w")
    else:
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name, memory, sms = _cpu_name(), pages // local_world, 1
    gpu = Gpu(
        name=name,
        generation=device.type,
        hbm_bytes=memory,
        hbm_Bps=passes.Bps,
        peak_flops=best,
        sustained=dict.fromkeys(best, 1.0),
        nvlink_Bps=near[0] if near else passes.Bps / 2,
        nvlink_domain=local_world,
        nic_Bps=far[0] if far else PRESUMED_NIC_BPS,
        power_w=0.0,
        sms=sms,
        source="measured; its peak is the best product that was",
    )
    return gpu, (*presumed, "power_w")


def _rates(products: Products) -> list[float]:
    return [2 * m * n * k / seconds for m, n, k, seconds in products.points]


def of_catalogue(name: str, memory_bytes: int) -> Gpu | None:
    """The entry for a device as CUDA names it: its first word is in the name, and it has as much memory."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    near = [gpu for key, gpu in gpus().items() if key.split("-")[0] in words and ("pcie" in key) == ("pcie" in words)]
    near = [gpu for gpu in near if abs(gpu.hbm_bytes / memory_bytes - 1) < 0.1]
    return min(near, key=lambda gpu: abs(gpu.hbm_bytes - memory_bytes), default=None)


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def pick_device(device: str, processes: int) -> Literal["cpu", "cuda"]:
    """Where to measure; "auto" is the GPU, if there is one and not several processes share it."""
    there = torch.cuda.device_count() > 0
    if device == "cuda" and not there:
        raise Refused([Problem("--device", device, "there is no CUDA device", ("cpu",))])
    if device == "cuda" and processes > 1:
        reason = "is of processes joined by gloo, on CPUs: torchrun --nproc-per-node N -m trigrid calibrate uses GPUs"
        raise Refused([Problem("--processes", processes, reason, (1,))])
    return "cuda" if device == "cuda" or (device == "auto" and there and processes == 1) else "cpu"


@contextmanager
def joined(order: Order, place: Place, console: Console) -> Iterator[tuple[torch.device, Progress]]:
    """This rank of a launcher's, joined with the others, with its device and what it tells of its progress."""
    if order.device == "cuda" and torch.cuda.device_count() < place.local_world:
        reason = f"this node has {torch.cuda.device_count()} CUDA devices for {place.local_world} ranks"
        raise Refused([Problem("--device", order.device, reason, ("cpu",))])
    device = _device(order, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world > 1:
        faults = Faults()
        with start_limit(place, faults):
            attempt = gather(open_store(place, faults), place.rank, place.world, "", faults.start_s, console.say)
            join(place, device, faults, attempt.store)
    console = console if place.rank == 0 else Console(quiet=True)
    with console.progress() as progress:
        yield device, progress
    if place.world > 1:
        dist.destroy_process_group()
