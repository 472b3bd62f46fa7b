"""What must not grow with the steps of a run, counted in a worker process."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.step_probes import engine_of, rows_of
from trigrid.engine.runtime import Engine
from trigrid.spec.job import Job

LOOKS, LOOK_S = 5, 0.02


class Held(NamedTuple):
    """storages: number and bytes of all tensors that Python can reach; heap_bytes: what malloc has given out, by
    whomever, also what only autograd or a collective holds."""

    storages: int
    storage_bytes: int
    descriptors: int
    groups: int
    threads: int
    heap_bytes: int


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def held() -> Held:
    gc.collect()
    sizes = {}
    for item in gc.get_objects():
        # By its type: asking a module for its class may warn that the module is old.
        if issubclass(type(item), Tensor):
            storage = item.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    heap = libc.mallinfo2()
    return Held(
        storages=len(sizes),
        storage_bytes=sum(sizes.values()),
        descriptors=len(os.listdir("/proc/self/fd")),
        groups=len(dist.distributed_c10d._world.pg_map),
        threads=len(os.listdir("/proc/self/task")),
        heap_bytes=heap.uordblks + heap.hblkhd,
    )


def settled() -> Held:
    """The least of several looks: gloo's threads let go of a tensor a moment after who waited for it goes on."""
    looks = []
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        looks.append(held())
    return min(looks)


Leak = Callable[[Engine, list[object]], None]
"""Called after each step, with a list that lives as long as the run."""


def hold_a_tensor(engine: Engine, kept: list[object]) -> None:
    kept.append(torch.zeros(1))


def hold_a_graph(engine: Engine, kept: list[object]) -> None:
    """A tensor that Python cannot reach: only the graph has it, of which only an edge is kept."""
    x = torch.zeros(64, 64, requires_grad=True)
    kept.append(torch.autograd.graph.get_gradient_edge(torch.zeros(64, 64).exp().mul(x).sum()))


def hold_a_group(engine: Engine, kept: list[object]) -> None:
    if len(kept) < 20:
        kept.append(dist.new_group())


def hold_a_file(engine: Engine, kept: list[object]) -> None:
    kept.append(os.dup(0))


def run_on(rank: int, job: Job, steps: int, lengths: tuple[int, ...], leak: Leak | None = None) -> list[Held]:
    """What is held after each fifth of `steps` steps; the lengths of sequences take turns, and every 25th step is
    followed by a validation."""
    engine = engine_of(rank, job)
    kept: list[object] = []
    found = []
    for step in range(steps):
        tokens, labels = (rows[..., : lengths[step % len(lengths)]].contiguous() for rows in rows_of(engine, step))
        engine.step(tokens, labels, 1e-3)
        if step % 25 == 24:
            engine.evaluate(tokens[:1, :, :4].contiguous(), labels[:1, :, :4].contiguous())
        del tokens, labels
        if leak:
            leak(engine, kept)
        if (step + 1) % (steps // 5) == 0:
            found.append(settled())
    for descriptor in kept if leak is hold_a_file else []:
        assert isinstance(descriptor, int)
        os.close(descriptor)
    return found
