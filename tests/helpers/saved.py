"""Engines filled with values that tell where each element belongs, saved and read back under other layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from trigrid.blueprint.parameters import LocalParameter
from trigrid.checkpoint.folder import path_of
from trigrid.checkpoint.manifest import State
from trigrid.checkpoint.restore import Found, find_sound, load
from trigrid.checkpoint.saver import Saver
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.spec.job import Job

KINDS = ("weight", "mean", "square")


def told(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    """A global tensor no two elements of which are alike, nor those of two parameters or kinds."""
    numel = int(torch.tensor(shape).prod())
    first = crc32(f"{kind} of {name}".encode()) % 1009 + 1
    return (first + torch.arange(numel, dtype=torch.float64) / 4096).view(shape)


def told_locally(local: LocalParameter, kind: str) -> Tensor:
    """What a rank has of it, padding zero."""
    whole = told(local.parameter.name, kind, local.parameter.shape)
    out = torch.zeros(local.shape, dtype=torch.float64)
    out[tuple(slice(0, stop - start) for start, stop in local.box)] = whole[tuple(slice(*ends) for ends in local.box)]
    return out


def fill(engine: Engine) -> None:
    """Give every element the value that it is told by, and the optimizer seven updates."""
    for name, bucket in engine.buckets.items():
        for kind in KINDS[: 1 if bucket.frozen else 3]:
            target, wanted = _both(engine, name, kind)
            target.copy_(wanted)
    engine.resume(7)


def wrong(engine: Engine) -> list[str]:
    """What of an engine is not as `fill` leaves it: masters, moments, full weights, updates."""
    found = []
    for name, bucket in engine.buckets.items():
        for kind in KINDS[: 1 if bucket.frozen else 3]:
            target, wanted = _both(engine, name, kind)
            if not torch.equal(target, wanted.to(target.dtype)):
                found.append(f"{kind} of {name}")
        bucket.open()
        for index, entry in enumerate(bucket.layout.entries):
            weight = bucket.weight(index, index)
            if not torch.equal(weight, told_locally(entry.local, "weight").to(bucket.dtypes.master).to(weight.dtype)):
                found.append(f"full weight of {entry.local.parameter.name}")
        bucket.release()
    adamw = engine.optimizer._adamw
    assert adamw is not None
    found += [f"updates {state['step']}" for state in adamw.state.values() if state["step"] != 7]
    return found


def _both(engine: Engine, name: str, kind: str) -> tuple[Tensor, Tensor]:
    bucket = engine.buckets[name]
    target = bucket.master if kind == "weight" else engine.optimizer.moments[name][KINDS.index(kind) - 1]
    flat = torch.zeros(bucket.layout.numel, dtype=torch.float64)
    for entry in bucket.layout.entries:
        flat[entry.offset : entry.stop] = told_locally(entry.local, kind).flatten()
    return target, flat[bucket.held[0] : bucket.held[0] + target.numel()]


def engine_of(job: Job, rank: int) -> Engine:
    return build_engine(job, Comm(grid_of(job), rank), torch.device("cpu"))


def save_now(engine: Engine, run_dir: Path, state: State, background: bool = False) -> list[str]:
    """Write one checkpoint; what went wrong."""
    engine.job = replace(engine.job, checkpoint=replace(engine.job.checkpoint, background=background))
    saver = Saver(engine, run_dir, engine.comm.host_group())
    saver.save(state)
    outcomes = saver.finish()
    saver.close()
    return [outcome.error for outcome in outcomes if outcome.error]


def filled_and_saved(rank: int, job: Job, run_dir: Path, step: int) -> list[str]:
    engine = engine_of(job, rank)
    fill(engine)
    return save_now(engine, run_dir, State(step, consumed=step * 8, updates=7))


def read_and_saved(rank: int, job: Job, run_dir: Path, step: int, then: int) -> list[str]:
    """Read checkpoint `step`; what is wrong with it. Then save it as checkpoint `then`."""
    engine = engine_of(job, rank)
    found, faults = find_sound(engine.comm, [path_of(run_dir, step)])
    assert isinstance(found, Found), faults
    state = load(engine, found, engine.comm.host_group())
    assert (state.step, state.consumed, state.updates) == (step, step * 8, 7)
    return wrong(engine) + save_now(engine, run_dir, State(then, consumed=then * 8, updates=7))
