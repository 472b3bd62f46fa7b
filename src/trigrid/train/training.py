"""The training loop of one rank, from where a run stands to its end, to a signal, or to a failure."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch.distributed as dist

from trigrid.checkpoint.folder import checkpoints, path_of, set_aside_after, step_of
from trigrid.checkpoint.manifest import State
from trigrid.checkpoint.restore import find_sound, load
from trigrid.checkpoint.saver import Outcome, Saver
from trigrid.data.loader import Batch, Loader, read_ahead
from trigrid.engine.finish import StepResult
from trigrid.engine.runtime import Engine
from trigrid.errors import RunFailed
from trigrid.report.events import EventLog
from trigrid.report.log import Log
from trigrid.spec.job import Job
from trigrid.train import stopping
from trigrid.train.course import is_spike, merged, places
from trigrid.train.learning_rate import learning_rate
from trigrid.train.meter import Meter
from trigrid.train.sampling import Sampler
from trigrid.train.timeline import start_recording, write_recording
from trigrid.train.watchdog import Watchdog

Placed = tuple[int, Batch]
"""A batch and the place of its first sample."""


class Training:
    """Trains `engine` from `state` on. All ranks must do the same; the first has a `log` and `events`.

    source: the checkpoint that it goes on from, if any; one of another run is no place to go back to. group: of all
    ranks on the host, for checkpoints alone.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        loader: Loader,
        held_out: Loader | None,
        state: State,
        source: Path | None,
        run_dir: Path,
        group: dist.ProcessGroup | None,
        watchdog: Watchdog,
        sampler: Sampler,
        log: Log | None,
        events: EventLog | None,
    ) -> None:
        self._job, self._engine = job, engine
        self._loader, self._held_out = loader, held_out
        self._state, self._run_dir, self._group = state, run_dir, group
        self._watchdog, self._sampler, self._log, self._events = watchdog, sampler, log, events
        self._saver = Saver(engine, run_dir, group)
        self._meter = Meter(engine.comm, engine.device)
        self._saved = state.step if source == path_of(run_dir, state.step) else -1
        self._unsaved: str | None = None

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self._state.step

    def run(self) -> bool:
        """Train to the last step; whether it came to that, and was not told to stop."""
        job, steps = self._job, self._job.run.steps
        batches = self._batches()
        stopped, first = self._told() is not None, True
        if "rewind" in (job.faults.on_nan, job.faults.on_spike) and self._saved < 0:
            # Something to go back to from the first step on.
            self._save()
        try:
            while self._state.step < steps and not stopped:
                before, begun_s = self._state.step, time.perf_counter()
                self._watchdog.phase(f"step {before + 1}")
                stopped = self._step(batches)
                if first:
                    first = False
                    self._note("first_step", step=before + 1, step_s=time.perf_counter() - begun_s)
                if self._state.step <= before:
                    batches.close()
                    batches = self._batches()
        except RunFailed:
            # All ranks have found the same: what is being written is worth waiting for.
            self._settle()
            raise
        batches.close()
        self._settle()
        self._saver.close()
        if stopped and self._state.step < steps:
            self._preempted()
            return False
        self._note("end", step=self._state.step)
        if self._unsaved is not None:
            raise RunFailed(f"all steps are done, and their weights are not kept: {self._unsaved}")
        return True

    def _settle(self) -> None:
        """Wait for the checkpoint under way, and tell of it."""
        self._watchdog.phase("checkpoint")
        self._tell(self._saver.finish())

    def _batches(self) -> Generator[Placed]:
        """The batches of the steps that are left, read ahead."""
        job, dp, coord = self._job, self._job.parallel.dp, self._engine.comm.coord

        def read(start: int) -> Placed:
            return start, self._loader.batch(start, coord.dp, dp, job.batch.micro_batch)

        starts = places(self._state.consumed, job.batch.global_batch, self._state.skipped)
        yield from read_ahead(read, islice(starts, job.run.steps - self._state.step), job.data.workers)

    def _step(self, batches: Generator[Placed]) -> bool:
        """One step and what belongs to it; whether any rank has been told to stop."""
        job, engine, log, number = self._job, self._engine, self._log, self._state.step + 1
        last = number == job.run.steps
        if traced := number == job.run.trace_step:
            start_recording(engine)
        sampled = self._sampler.begin(may=not traced)
        self._meter.begin()
        start, batch = next(batches)
        data_wait_s = self._meter.loaded()
        rate = learning_rate(job.optimizer, number - 1, job.run.steps)
        stop = stopping.asked() is not None
        result = engine.step(batch.tokens, batch.labels, rate, batch.documents, start, stop=stop)
        step_s = self._meter.end()
        if sampled:
            self._sampler.end(number, data_wait_s, result.updated)
        path = write_recording(engine, self._run_dir, number) if traced else None
        if path and log:
            log.say(f"timeline of step {number}: {path}")
        if self._gone_back(result, start):
            return result.asked_to_stop
        self._state = self._after(result, start)
        if job.run.check_copies:
            check_copies(engine, number, rate, start)
        if log:
            log.advance(result.loss, step_s, self._tokens)
        if last or number % job.run.log_every == 0:
            interval = self._meter.read()
            if log:
                log.step(result.gradient_norm, rate, interval)
        if self._held_out and (last or number % job.run.validate_every == 0):
            self._watchdog.phase("validation")
            loss = self._validate(self._held_out)
            if log:
                log.validation(loss)
        stopping_now = result.asked_to_stop and bool(job.checkpoint.every)
        if self._saver.due(number, last) or stopping_now:
            self._save()
        self._tell(self._saver.finished())
        return result.asked_to_stop

    def _after(self, result: StepResult, start: int) -> State:
        """Where the run stands after a step that counts."""
        state, faults = self._state, self._job.faults
        recent = state.recent
        if faults.on_spike == "rewind" and math.isfinite(result.loss):
            recent = (*recent, result.loss)[-faults.spike_window :]
        return replace(
            state,
            step=state.step + 1,
            consumed=start + self._job.batch.global_batch,
            updates=state.updates + result.updated,
            recent=recent,
        )

    def _gone_back(self, result: StepResult, start: int) -> bool:
        """Judge a step; True where the run has gone back to an earlier one, RunFailed where it must end."""
        faults, number = self._job.faults, self._state.step + 1
        batch = (start, start + self._job.batch.global_batch)
        if not result.updated:
            culprits = "; ".join(result.not_finite[:8])
            what = f"step {number}: the gradient is not finite, no weight was changed ({culprits})"
            self._note("not_finite", step=number, loss=result.loss, action=faults.on_nan, consumed=start)
            if faults.on_nan == "stop":
                raise RunFailed(what)
            if faults.on_nan == "skip":
                if self._log:
                    self._log.warn(f"{what}; going on with the next batch")
                return False
            self._rewind(what, batch, number - 1)
            return True
        if faults.on_spike == "rewind" and is_spike(
            result.loss, self._state.recent, faults.spike_window, faults.spike_sigmas
        ):
            self._note("spike", step=number, loss=result.loss, action="rewind", consumed=start)
            # The batch before has made the weights that this loss is of.
            before = self._state.consumed - self._job.batch.global_batch
            what = f"step {number}: the loss of {result.loss:.4f} is a spike"
            self._rewind(what, (max(0, before), batch[1]), number - 2)
            return True
        return False

    def _rewind(self, what: str, bad: tuple[int, int], good: int) -> None:
        """Go back to the newest sound checkpoint of step `good` or before, and pass over the samples of `bad` then."""
        state, faults = self._state, self._job.faults
        if state.rewinds >= faults.max_rewinds:
            raise RunFailed(f"{what}; the run has gone back {state.rewinds} times (faults.max_rewinds)")
        self._settle()
        there = [path for path in checkpoints(self._run_dir) if (step_of(path) or 0) <= good]
        found, wrong = find_sound(self._engine.comm, there)
        if found is None:
            told = f" ({'; '.join(wrong[:4])})" if wrong else ""
            raise RunFailed(f"{what}; there is no sound checkpoint to go back to{told}")
        loaded = load(self._engine, found, self._group)
        self._saved = loaded.step
        for fault in wrong if self._log else ():
            self._log.warn(fault)  # type: ignore[union-attr]
        self._state = replace(loaded, skipped=merged(state.skipped, bad), rewinds=state.rewinds + 1)
        self._note("rewind", from_step=state.step + 1, to_step=loaded.step, skipped=list(bad))
        if self._log:
            self._log.warn(f"{what}; back to step {loaded.step}, on without samples {bad[0]:,} to {bad[1] - 1:,}")
            self._log.rewind(loaded.step)
            set_aside_after(self._run_dir, loaded.step)

    def _save(self) -> None:
        if self._saved == self._state.step:
            return
        self._saved = self._state.step
        self._watchdog.phase("checkpoint")
        self._note("checkpoint_begin", step=self._state.step)
        self._saver.save(self._state)

    def _tell(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._unsaved = outcome.error
            if outcome.error is None:
                seconds, blocked_s = outcome.seconds, outcome.blocked_s
                self._note("checkpoint", step=outcome.step, seconds=seconds, blocked_s=blocked_s, bytes=outcome.bytes)
                if self._log:
                    self._log.checkpoint(outcome.step, outcome.bytes, seconds, blocked_s)
                continue
            self._note("checkpoint_failed", step=outcome.step, reason=outcome.error)
            if self._log:
                self._log.warn(
                    f"the checkpoint of step {outcome.step} was not written: {outcome.error}; training goes on, and "
                    "earlier checkpoints are as they were"
                )

    def _preempted(self) -> None:
        """Leave word that the run was told to stop, and where it can go on."""
        step, path = self._state.step, path_of(self._run_dir, self._state.step)
        there = path if path.exists() else next(iter(checkpoints(self._run_dir)), None)
        signal = self._told()
        if self._log:
            stopping.mark(self._run_dir, step, there, signal)
            way_on = f"the run can go on from {there}" if there else "it has no checkpoint"
            self._log.warn(f"told to stop by {signal} after step {step}; {way_on}")
        stopping.answer()
        self._note("preempted", step=step, signal=signal, checkpoint=str(there) if there else None)

    @property
    def _tokens(self) -> int:
        """That the run has trained on so far."""
        skipped = sum(min(stop, self._state.consumed) - start for start, stop in self._state.skipped)
        return (self._state.consumed - skipped) * self._job.batch.sequence

    def _told(self) -> str | None:
        """The signal that told any rank to stop, the same on all; the first one need not be among them."""
        told = next(filter(None, self._engine.comm.gather_objects(stopping.asked())), None)
        return str(told) if told else None

    def _note(self, kind: str, **values: object) -> None:
        if self._events:
            self._events.write(kind, **values)

    def _validate(self, held_out: Loader) -> float:
        """Mean loss over the same few batches of held-out text each time."""
        job, dp_rank = self._job, self._engine.comm.coord.dp
        losses = []
        for number in range(job.run.validation_batches):
            first = number * job.batch.global_batch
            batch = held_out.batch(first, dp_rank, job.parallel.dp, job.batch.micro_batch)
            losses.append(self._engine.evaluate(batch.tokens, batch.labels, batch.documents))
            if self._log:
                self._log.validating(len(losses), job.run.validation_batches)
        return math.fsum(losses) / len(losses)


def check_copies(engine: Engine, step: int, rate: float, consumed: int) -> None:
    """Raise RunFailed where ranks are not at the same step, rate and sample, or hold unequal copies of a weight."""
    found = engine.comm.gather_objects(f"step {step}, learning rate {rate!r}, {consumed} samples before it")
    if len(set(found)) > 1:
        told = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(found))
        raise RunFailed(f"ranks are out of step: {told}")
    if differ := engine.disagreements():
        raise RunFailed(f"step {step}: copies of a weight differ: {'; '.join(differ[:8])}")
