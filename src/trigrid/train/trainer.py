"""What one rank does from joining the others to the summary."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

import trigrid
from trigrid.blueprint import decoder
from trigrid.blueprint.flops import train_flops_per_token
from trigrid.checkpoint.folder import clear, set_aside_after
from trigrid.checkpoint.manifest import Damaged, State
from trigrid.checkpoint.restore import find_sound, load
from trigrid.data.loading import loaders
from trigrid.data.prepare import Prepared
from trigrid.data.prepare import load as load_data
from trigrid.engine.comm import Comm
from trigrid.engine.matmul import matmul_precision
from trigrid.engine.runtime import Engine
from trigrid.engine.zero import TORCH_DTYPE
from trigrid.grid import grid_of
from trigrid.launch.place import LAUNCH_VARIABLE, RUN_DIR_VARIABLE, Place, host_of, launcher_of, restarts_of
from trigrid.models.build import build_engine
from trigrid.report.console import Console
from trigrid.report.events import EventLog
from trigrid.report.host import resident_bytes
from trigrid.report.log import Log
from trigrid.report.metrics import Facts, Summary
from trigrid.spec.job import Job
from trigrid.spec.precision import PRECISIONS
from trigrid.train import stopping
from trigrid.train.logs import own_log, tell_earlier
from trigrid.train.machine import check_compiler, check_products, matmul_flops_per_s
from trigrid.train.meeting import first_alone, take_seats
from trigrid.train.opening import Opened, again, check_same, check_shared, launched_by, link, linked, lock, open_run
from trigrid.train.processes import choose_device, join, open_store, seat_here, start_limit, torch_timeout
from trigrid.train.sampling import Sampler
from trigrid.train.training import Training
from trigrid.train.watchdog import Watchdog


@dataclass(frozen=True)
class Ended:
    """A run without a summary: it had all its steps before, or was told to stop."""

    state: Literal["complete", "preempted"]
    steps: int
    run_dir: str


def run_rank(job: Job, name: str, place: Place | None, resume: str | None, console: Console) -> Summary | Ended | None:
    """Everything one rank does; returns how the run ended on rank 0, the only one to speak on its `console`, and None
    on others. `place` is None for a job of one process; `resume` as in `open_run`."""
    place = place or Place(0, 1, 0, 1, "127.0.0.1", 0, "none")
    first = place.rank == 0
    console = console if first else Console(quiet=True)
    stopping.install()
    stopping.grant(job.faults.grace_s)
    store, restarts = None, restarts_of(os.environ)
    if place.world > 1:
        # Before the data is prepared, which may take an hour.
        with start_limit(place, job.faults), console.waiting(f"meeting {place.world} ranks"):
            met = take_seats(open_store(place, job.faults), place, seat_here(job, place), job, console)
            place, store, restarts = met.place, met.attempt.store, max(restarts, met.attempt.number - 1)
    device = choose_device(job, place)
    check_compiler(job, device)
    # Before joining: a collective that waited for the data to be prepared could run into its time limit.
    with first_alone(store, place, job.faults):
        mine = _open(job, name, resume, console, restarts) if first else None
        held = lock(mine.run_dir) if mine else None
        if mine:
            clear(mine.run_dir)
    with start_limit(place, job.faults):
        if store is not None:
            with console.waiting(f"joining {place.world} ranks"):
                join(place, device, job.faults, store)
        comm = Comm(grid_of(job), place.rank, device, torch_timeout(job.faults))
        opened = comm.gather_objects(mine)[0]
        hosts = tuple(map(str, comm.gather_objects(host_of(os.environ))))
    assert isinstance(opened, Opened)
    run_dir = opened.run_dir
    check_shared(run_dir, place.rank)
    several = len({*hosts}) > 1
    first_at = (place.address, place.port) if several and place.local_rank == 0 else None
    watchdog = Watchdog(comm.activity, job.faults, run_dir, place.rank, place.world, hosts if several else (), first_at)
    with own_log(run_dir, place.rank), watchdog:
        before_bytes = resident_bytes()
        making = "making the schedule and " if job.parallel.schedule == "auto" else ""
        with console.waiting(f"{making}building the engine"):
            engine = build_engine(job, comm, device)
        if told := check_products(engine):
            console.say(told)
        data = load_data(run_dir / "data.json")
        group = comm.host_group()
        watchdog.phase("checkpoint")
        state, source = _restore(job, engine, data, opened, group, console)
        watchdog.phase("start")
        summary: Summary | Ended | None = None
        events = EventLog(run_dir) if first else None
        if state.step >= job.run.steps:
            console.say(f"the run has all of its {job.run.steps} steps: nothing is left to do")
            if events:
                events.write("end", step=state.step)
                summary = Ended("complete", state.step, str(run_dir))
        else:
            facts = _facts(job, engine, data)
            if events:
                path = str(source) if source else None
                events.write("start", step=state.step, resumed=bool(source), checkpoint=path, world=place.world)
            sampler = Sampler(engine, run_dir, state.step, facts.device, place.local_world, before_bytes)
            with Log(job, facts, run_dir, console, state.step) if first else nullcontext() as log:
                training = Training(
                    job, engine, *loaders(job, data), state, source, run_dir, group, watchdog, sampler, log, events
                )
                finished = training.run()
                if log:
                    summary = log.end() if finished else Ended("preempted", training.step, str(run_dir))
    if held:
        held.close()
    if place.world > 1:
        dist.destroy_process_group()
    return summary


def _open(job: Job, name: str, resume: str | None, console: Console, restarts: int) -> Opened:
    """The run's folder, and what it goes on from: found or made here, or given by who started the ranks, so many times
    before."""
    given = os.environ.get(RUN_DIR_VARIABLE)
    if given is not None:
        opened = again(Path(given), resume, bool(restarts))
    else:
        # One process, or ranks of the user's own launcher, which does not know the run's folder.
        launcher, launch = launcher_of(os.environ), os.environ.get(LAUNCH_VARIABLE)
        own = linked(job, launch) if launch else launched_by(job, name, launcher) if restarts else None
        opened = again(own, resume, True) if own else open_run(job, name, resume, console)
        tell_earlier(opened.run_dir)
        EventLog(opened.run_dir).write("launch", world=job.parallel.world, restart=restarts, launcher=launcher)
        stopping.unmark(opened.run_dir)
        if launch:
            link(job, launch, opened.run_dir)
    return opened


def _restore(
    job: Job, engine: Engine, data: Prepared, opened: Opened, group: dist.ProcessGroup | None, console: Console
) -> tuple[State, Path | None]:
    """Set the engine to the first sound candidate, if there is one; where the run stands, and the candidate."""
    fresh = State(data=data.hash)
    if not opened.candidates:
        return fresh, None
    with console.waiting("verifying the checkpoint"):
        found, faults = find_sound(engine.comm, list(opened.candidates))
    if found is None:
        raise Damaged("\n".join(faults))
    for fault in faults:
        console.warn(fault)
    changes = check_same(job, data, found.path, found.manifest)
    with console.waiting("reading the checkpoint"):
        state = load(engine, found, group)
    if not state.data:
        console.say(f"weights of {found.path}; moments, samples and steps begin anew")
        return fresh, found.path
    console.say(f"going on after step {state.step}, {state.consumed:,} samples, from {found.path}")
    for change in changes:
        console.say(f"  from here on {change}")
    if engine.comm.rank == 0:
        for path in set_aside_after(opened.run_dir, state.step):
            console.warn(f"a later checkpoint, which this run does not go on from, is now {path}")
    return state, found.path


def _facts(job: Job, engine: Engine, data: Prepared) -> Facts:
    name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
    full, causal = (train_flops_per_token(job.model, job.batch.sequence, causal=causal) for causal in (False, True))
    return Facts(
        trigrid=trigrid.__version__,
        world=job.parallel.world,
        device=name,
        precision=job.run.precision,
        parameters=decoder(job.model).count,
        steps=job.run.steps,
        tokens_per_step=job.batch.global_batch * job.batch.sequence,
        flops_per_token_full=full,
        flops_per_token_causal=causal,
        matmul_flops_per_s=_cluster_rate(job, engine),
        data=data.hash,
    )


def _cluster_rate(job: Job, engine: Engine) -> float:
    """Sum over ranks of their matmul rates, measured together."""
    dtype = TORCH_DTYPE[PRECISIONS[job.run.precision].compute]
    # Ranks that share cores must measure at the same time to measure their share.
    engine.comm.all_reduce(torch.zeros(1, device=engine.device), "world")
    with matmul_precision(job.run.matmul_precision):
        rate = matmul_flops_per_s(dtype, engine.device)
    mine = torch.tensor([rate], dtype=torch.float64, device=engine.device)
    return engine.comm.read(engine.comm.all_reduce(mine, "world"))[0]
