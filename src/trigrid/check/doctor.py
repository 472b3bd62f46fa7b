"""`trigrid doctor`: looks over the machine or the cluster that it runs on, before a run.

Nodes are looked at and seats are told before the ranks join, so that what keeps them from joining is found as well.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trigrid.check.calibrate import of_catalogue
from trigrid.check.calibrate_meter import Meter
from trigrid.check.doctor_gpus import ask_gpus, judge_gpus, read_gpus
from trigrid.check.doctor_host import look_at_disk, look_at_host, versions
from trigrid.check.doctor_judge import Judge, Taken, judge_skew
from trigrid.check.doctor_network import (
    MOST_NODES,
    measure_axes,
    measure_neighbours,
    measure_pairs,
    measure_skew,
    rounds_of,
)
from trigrid.engine.comm import Comm
from trigrid.engine.zero import TORCH_DTYPE
from trigrid.grid import Grid, grid_of
from trigrid.launch.hosts import read_topology
from trigrid.launch.place import Place, host_of
from trigrid.launch.seats import Seat, Seating, arrange, cautions, faults, seat_of
from trigrid.plan.machine import make_machine
from trigrid.plan.network import Network
from trigrid.plan.plan import machine_of
from trigrid.report.console import Console
from trigrid.report.doctor import Examination, Finding, differing, merged
from trigrid.spec.cluster import Cluster
from trigrid.spec.gpu import Gpu, load_gpu
from trigrid.spec.job import Faults, Job
from trigrid.spec.layout import Layout
from trigrid.spec.precision import PRECISIONS, Format
from trigrid.train.machine import matmul_flops_per_s
from trigrid.train.meeting import sit
from trigrid.train.processes import join, open_store, seat_here, start_limit, too_few

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LEAVE_S = 60.0
SHARES = {"axes": 0.25, "neighbours": 0.05, "pairs": 0.35}
"""Of the seconds; the rest is for starting, products, disks and NVIDIA's tools."""
ALONE = Place(0, 1, 0, 1, "127.0.0.1", 0, "none")


@dataclass(frozen=True)
class Order:
    """What to look at: the machine for `job`, if there is one, in about `seconds`."""

    job: Job | None
    seconds: float

    @property
    def out(self) -> Path:
        return Path(self.job.run.out if self.job else ".")


def examine(order: Order, place: Place | None, console: Console) -> Examination | bool:
    """As one of the ranks of a launcher, or alone: on the first rank all that was found, on others whether it is
    sound."""
    begun = time.perf_counter()
    place = place or ALONE
    # An import of torch from a busy disk takes minutes: ranks have as long as in training.
    limits = order.job.faults if order.job else Faults()
    seat = _seat(order.job, place)
    store = None
    seating = Seating((seat,))
    if place.world > 1:
        with start_limit(place, limits), console.waiting(f"meeting {place.world} ranks"):
            place, store, seating = _meet(open_store(place, limits), place, seat, order.job, limits, console)
    device = _device(order.job, place)
    host = host_of(os.environ)
    leader = seating.hosts[host][0] == place.rank
    sound = all(not seat.trouble for seat in seating.seats)
    findings = look_at_host(host, device.type, place.local_world, place.world) if leader else []
    taken = None
    if sound:
        if store is not None:
            with start_limit(place, limits):
                join(place, device, limits, store)
        grid = _grid(order.job, place)
        comm = Comm(grid, place.rank, device, timedelta(seconds=limits.start_s))
        with console.progress() as progress:
            meter = Meter(device, comm if place.world > 1 else None, progress if place.rank == 0 else lambda *_: None)
            taken, clocks = _measure(meter, comm, seating, order)
        findings += _clocks(clocks, host) if leader and device.type == "cuda" else []
        skews = measure_skew(store, place.rank, {h: ranks[0] for h, ranks in seating.hosts.items()}) if store else []
        findings += [judge_skew(skews)] if place.rank == 0 else []
    if leader and len(seating.hosts) <= MOST_NODES:
        findings += look_at_disk(order.out, host, len(seating.hosts), order.job)
    mine = (host, versions(device.type), [asdict(finding) for finding in findings], leader)
    everyone = _gathered(store, place, (mine, taken))
    if place.rank:
        answer = store is not None and store.get("doctor's verdict") == b"sound"
        _leave(store, place, sound)
        return answer
    found = _examination(order, place, seating, device, everyone, time.perf_counter() - begun)
    if store is not None:
        store.set("doctor's verdict", "wrong" if found.wrong else "sound")
    _leave(store, place, sound)
    return found


def _seat(job: Job | None, place: Place) -> Seat:
    if job is not None:
        return seat_here(job, place)
    gpus = torch.cuda.device_count()
    if not gpus:
        return seat_of(os.environ, place.rank, "cpu", "")
    name = torch.cuda.get_device_name(min(place.local_rank, gpus - 1))
    return seat_of(os.environ, place.rank, name, too_few(place, gpus))


def _meet(
    store: Store, place: Place, seat: Seat, job: Job | None, limits: Faults, console: Console
) -> tuple[Place, Store, Seating]:
    """The place of this rank in the grid as training would choose it, the store of this attempt, and where all are; the
    first one tells the others no more than hosts and troubles, since all of them read it."""
    here: list[Seating] = []

    def settle(seats: list[Seat]) -> Seating:
        topology = read_topology(job.cluster.topology) if job and job.cluster.topology else None
        here.append(arrange(seats, topology))
        return here[0]

    met = sit(store, place, seat, limits, console, settle)
    place, store = met.place, met.attempt.store
    if here:
        broken = {seat.host: seat.trouble for seat in here[0].seats if seat.trouble}
        hosts = [(host, len(ranks), broken.get(host, "")) for host, ranks in here[0].hosts.items()]
        store.set("doctor's seats", json.dumps(hosts))
        return place, store, here[0]
    hosts = json.loads(store.get("doctor's seats"))
    told = [(host, trouble) for host, count, trouble in hosts for _ in range(count)]
    return place, store, Seating(tuple(Seat(rank, host, (), "", trouble) for rank, (host, trouble) in enumerate(told)))


def _device(job: Job | None, place: Place) -> torch.device:
    gpus = torch.cuda.device_count() if job is None or job.run.device != "cpu" else 0
    if not gpus:
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank if place.local_rank < gpus else 0)
    torch.cuda.set_device(device)
    return device


def _grid(job: Job | None, place: Place) -> Grid:
    """The job's; without a job each node is one tensor-parallel group, where all are as large."""
    if job is not None:
        return grid_of(job)
    near = place.local_world if place.world % place.local_world == 0 else 1
    return Grid(Layout(tp=near, dp=place.world // near), Cluster(gpus_per_node=place.local_world))


def _measure(meter: Meter, comm: Comm, seating: Seating, order: Order) -> tuple[Taken, str | None]:
    """What this rank measures, and what nvidia-smi said of the clocks meanwhile."""
    asked = ask_gpus() if meter.device.type == "cuda" else None
    # Ranks that share cores must multiply at the same time to measure their share.
    meter.agree(0.0)
    flops = matmul_flops_per_s(TORCH_DTYPE[_format(order.job, meter.device)], meter.device)
    clocks = asked.answer() if asked else None
    axes = measure_axes(meter, comm, SHARES["axes"] * order.seconds)
    neighbours = measure_neighbours(meter, comm, SHARES["neighbours"] * order.seconds)
    nodes = list(seating.hosts.values())
    sent, done = measure_pairs(meter, comm.rank, nodes, SHARES["pairs"] * order.seconds)
    return Taken(axes, neighbours, sent, done, flops), clocks


def _format(job: Job | None, device: torch.device) -> Format:
    """The number format of the products."""
    if job is not None:
        return PRECISIONS[job.run.precision].compute
    return "bf16" if device.type == "cuda" else "fp32"


def _gpu(device: torch.device) -> Gpu | None:
    return of_catalogue(torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1])


def _products(job: Job | None, device: torch.device) -> float | None:
    """FLOP/s that the catalogue says this GPU sustains."""
    if device.type != "cuda":
        return None
    gpu, name = _gpu(device), _format(job, device)
    return gpu.peak_flops[name] * gpu.sustained[name] if gpu and name in gpu.sustained else None


def _clocks(text: str | None, host: str) -> list[Finding]:
    if text is None:
        return [Finding(what="GPU clocks", verdict="not here", measured="nvidia-smi says nothing", where=(host,))]
    return list(judge_gpus(read_gpus(text), host))


Told = tuple[tuple[str, dict[str, str], list[dict[str, object]], bool], Taken | None]


def _gathered(store: Store | None, place: Place, mine: Told) -> list[Told]:
    """What all ranks have to tell, on the first one; through the store, since they may not have joined."""
    if store is None:
        return [mine]
    store.set(f"doctor {place.rank}", pickle.dumps(mine).hex())
    if place.rank:
        return []
    return [pickle.loads(bytes.fromhex(store.get(f"doctor {rank}").decode())) for rank in range(place.world)]


def _leave(store: Store | None, place: Place, joined: bool) -> None:
    """The first rank, which keeps the store, leaves last."""
    if store is None:
        return
    if joined:
        dist.destroy_process_group()
    if place.rank:
        store.set(f"doctor left {place.rank}", "")
    else:
        store.wait([f"doctor left {rank}" for rank in range(1, place.world)], timedelta(seconds=LEAVE_S))


def _examination(
    order: Order, place: Place, seating: Seating, device: torch.device, everyone: Sequence[Told], spent_s: float
) -> Examination:
    hosts = tuple(seating.hosts)
    leaders = [(host, there) for (host, there, _, leads), _ in everyone if leads]
    findings = differing(leaders)
    told = [Finding(**{**f, "where": tuple(f["where"])}) for (_, _, theirs, _), _ in everyone for f in theirs]  # type: ignore[arg-type]
    findings += merged(told, len(hosts))
    findings += _seats(order.job, seating)
    taken = [rank for _, rank in everyone if rank is not None]
    sampled = []
    if len(taken) == place.world:
        network = _network(order.job, device, place)
        if network is None and place.world > 1:
            advice = "trigrid calibrate, then cluster.calibration in the job: until then ranks are judged by each other"
            findings.append(Finding(what="expected bandwidth", verdict="not here", advice=advice))
        judge = Judge(_grid(order.job, place), seating, device.type, network, _products(order.job, device))
        findings += judge.judge(taken)
        every, done = len(rounds_of(list(seating.hosts.values()))), min(rank.rounds for rank in taken)
        if done < every:
            sampled.append(f"messages were measured in {done} of {every} rounds of pairs, each rank with {done} others")
    else:
        findings.append(Finding(what="collectives", verdict="not here", measured="the ranks cannot join"))
    if len(hosts) > MOST_NODES:
        sampled.append(f"clocks of {MOST_NODES} of {len(hosts):,} nodes were compared; no disk was measured")
    return Examination(place.world, hosts, tuple(findings), tuple(sampled), spent_s)


def _seats(job: Job | None, seating: Seating) -> Iterator[Finding]:
    """What training would refuse, or warn of, where the ranks are."""
    troubled = [seat for seat in seating.seats if seat.trouble]
    problems = faults(seating, grid_of(job)) if job else []
    if not job:
        for seat in troubled:
            yield Finding(what="node", verdict="wrong", measured=seat.trouble, where=(seat.host,))
    for problem in problems:
        where = (str(problem.value),) if problem.key == "node" else ()
        legal = f"nearest legal: {', '.join(map(str, problem.legal))}" if problem.legal else ""
        yield Finding(what=problem.key, verdict="wrong", measured=problem.reason, advice=legal, where=where)
    for problem in cautions(seating, grid_of(job)) if job else []:
        yield Finding(what=problem.key, verdict="told", measured=str(problem.value), advice=problem.reason)
    device = seating.seats[0].device
    if job and device != "cpu" and not troubled:
        _, memory = torch.cuda.mem_get_info()
        there, planned = of_catalogue(device, memory), load_gpu(job.cluster.gpu)
        yield Finding(
            what="GPU",
            verdict="wrong" if there and there.name != planned.name else "told",
            measured=device,
            expected=f"cluster.gpu = {planned.name}",
            advice=f"cluster.gpu = {there.name}: the plan is of another GPU" if there else "",
        )


def _network(job: Job | None, device: torch.device, place: Place) -> Network | None:
    """What prices the expected, if anything knows this machine."""
    if job and (device.type == "cuda" or job.cluster.calibration):
        return Network(machine_of(job.cluster))
    if device.type == "cuda":
        gpu = _gpu(device)
        return Network(make_machine(gpu, gpus_per_node=place.local_world)) if gpu else None
    return None
