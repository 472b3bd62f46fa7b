"""Writing checkpoints, on all ranks at once, while training goes on."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from trigrid.checkpoint.folder import aside, path_of, prune
from trigrid.checkpoint.manifest import State
from trigrid.checkpoint.parts import Part, parts_written, snapshot
from trigrid.checkpoint.planners import PartsSaver
from trigrid.checkpoint.storage import FolderWriter, among, reasons
from trigrid.engine.runtime import Engine
from trigrid.job import dump_job


@dataclass(frozen=True)
class Outcome:
    """How it went with the checkpoint of `step`: seconds from the call to the end, and those in which
    training stood still; bytes, known to the first rank; why it failed, if it did."""

    step: int
    seconds: float
    blocked_s: float
    bytes: int
    error: str | None


class Saver:
    """Writes checkpoints of `engine` to a run's folder. All ranks must call `save` and `finish` alike.

    group: of all ranks, for this alone and on the host, since a background thread speaks in it; None in a world of one.
    A checkpoint that cannot be written costs a message, not the run.
    """

    def __init__(self, engine: Engine, run_dir: Path, group: dist.ProcessGroup | None) -> None:
        self._engine, self._run_dir, self._group = engine, run_dir, group
        self._spec = engine.job.checkpoint
        self._job_text = dump_job(engine.job)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copy: list[Part] | None = None
        self._writing: Future[Outcome] | None = None
        self._done: list[Outcome] = []

    def due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is to be written after `step` steps."""
        every = self._spec.every
        return bool(every) and (last or step % every == 0)

    def save(self, state: State) -> None:
        """Begin the checkpoint of what the engine holds now, after waiting for the one before it, whose buffers it
        takes."""
        begun_s = time.perf_counter()
        self._collect(wait=True)
        error: Exception | None = None
        parts: list[Part] = []
        try:
            parts = parts_written(self._engine)
            if self._spec.background:
                parts = self._copy = snapshot(parts, self._copy)
        except Exception as caught:
            error = caught
        if self._spec.background:
            blocked_s = time.perf_counter() - begun_s
            self._writing = self._thread.submit(self._write, state, parts, error, begun_s, blocked_s)
        else:
            self._done.append(self._write(state, parts, error, begun_s, None))

    def finished(self) -> list[Outcome]:
        """Checkpoints that have come to an end since this was last called."""
        self._collect(wait=False)
        done, self._done = self._done, []
        return done

    def finish(self) -> list[Outcome]:
        """As `finished`, after waiting for the one under way."""
        self._collect(wait=True)
        return self.finished()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _collect(self, wait: bool) -> None:
        if self._writing is not None and (wait or self._writing.done()):
            self._done.append(self._writing.result())
            self._writing = None

    def _write(
        self, state: State, parts: list[Part], error: Exception | None, begun_s: float, blocked_s: float | None
    ) -> Outcome:
        path = path_of(self._run_dir, state.step)
        writer = FolderWriter(path, state, self._job_text)

        def planned() -> list[Part]:
            if error is not None:
                raise error
            return parts

        failure = None
        try:
            with among(self._group):
                save({}, storage_writer=writer, planner=PartsSaver(planned), process_group=self._group)
        except CheckpointException as caught:
            failure = reasons(caught)
        if self._engine.comm.rank == 0:
            if failure is None:
                prune(self._run_dir, self._spec.keep, self._spec.keep_every)
            else:
                # All ranks have come to the end of their part, whatever it was.
                shutil.rmtree(aside(path), ignore_errors=True)
        seconds = time.perf_counter() - begun_s
        return Outcome(state.step, seconds, seconds if blocked_s is None else blocked_s, writer.bytes, failure)
