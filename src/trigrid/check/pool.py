"""Worker processes on this machine, started once, through which layouts come and go.

Starting processes that import torch costs seconds each; each run joins those it needs anew, which costs milliseconds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from trigrid.errors import RunFailed
from trigrid.launch.place import LOOPBACK

T = TypeVar("T")


class Pool:
    """`world` processes joined by gloo over the loopback. Use as a context manager; processes start at the first
    run."""

    def __init__(self, world: int, timeout_s: float = 300.0):
        self.world = world
        self._timeout_s = timeout_s
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._runs = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., T], world: int, *arguments: object) -> list[T]:
        """`function(rank, *arguments)` on ranks 0 … world − 1; returns their results in order.

        `function` must be importable. Raises RunFailed with the traceback of the rank that failed first; the other
        processes, which may be waiting for it, are ended and new ones start with the next run.
        """
        assert world <= self.world, (world, self.world)
        if not self._workers:
            self._start()
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world])}
        results: dict[int, T] = {}
        assert self._folder is not None
        self._runs += 1
        store = str(Path(self._folder.name, f"store-{self._runs}"))
        try:
            for pipe in pipes:
                pipe.send((store, world, function, arguments))
            deadline = time.monotonic() + self._timeout_s
            while len(results) < world:
                waiting = [pipe for pipe, rank in pipes.items() if rank not in results]
                ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(pipes[pipe] for pipe in waiting)
                    raise RunFailed(f"no answer from ranks {missing} within {self._timeout_s:.0f} s")
                for pipe in waiting:
                    if pipe in ready:
                        results[pipes[pipe]] = _receive(pipe, pipes[pipe])
        except BaseException:
            self.close()
            raise
        return [results[rank] for rank in range(world)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # The server imports once; workers are forked from it and share its pages.
        context.set_forkserver_preload(["torch", "torch.distributed", "trigrid.models.build"])
        self._folder = tempfile.TemporaryDirectory(prefix="trigrid-pool-")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        """End every process."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _receive(pipe: Connection, rank: int) -> Any:
    try:
        ok, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise RunFailed(f"rank {rank} died") from None
    if not ok:
        raise RunFailed(f"rank {rank} failed\n{value}")
    return value


def _work(rank: int, pipe: Connection) -> None:
    """A worker: runs what it is sent until its pipe closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            store, world, function, arguments = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            if world > 1:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            answer = (True, function(rank, *arguments))
            if world > 1:
                dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
        del answer, arguments
        # Runs leave process groups in cycles, each with threads that wake up again and again. What else is here stays,
        # and to pass over it takes no time then.
        gc.collect()
        gc.freeze()
