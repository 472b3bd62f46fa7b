"""A run as it is told: console, metrics.jsonl and trackers while it lasts, its loss curve at the end."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from trigrid.report.console import Console, duration
from trigrid.report.curve import FEWEST_STEPS, Curve, as_text, save_svg
from trigrid.report.history import NAME, read_history
from trigrid.report.lines import LineFile
from trigrid.report.metrics import Facts, Interval, StepRecord, StepTable, Summary, rates
from trigrid.report.trackers import Start, Trackers
from trigrid.spec.job import Job

ETA_STEPS = 20
SLOW, SLOW_RECORDS = 1.5, 3
"""A rank is named that was busy for so many times as long as ranks like it, in so many records one after the other."""
ROWS_PER_HEADER = 20
"""On a terminal, where the header scrolls away; a file has it once, at the top."""


class Log:
    """What rank 0 tells of a run. Use as a context manager, which ends bars and trackers also where a step fails.

    Call `advance` after every step, and `step` and `validation` after those that are recorded. done: steps that the run
    had when it was started again.
    """

    def __init__(self, job: Job, facts: Facts, run_dir: Path, console: Console, done: int = 0) -> None:
        self._job, self._facts, self._run_dir, self._console = job, facts, run_dir, console
        self._table, self._rows = StepTable(facts.steps), 0
        self._progress = console.progress()
        self._metrics = LineFile(run_dir / NAME, console.warn)
        told = {**_flat(asdict(job)), **asdict(facts)}
        start = Start(run_dir, told, job.run.prometheus_port, console.say)
        self._trackers = Trackers(job.run.trackers, start, console)
        self._losses, self._validation = read_history(run_dir, done)
        self._step_s = array("d")
        self._tokens = 0
        self._data_wait_s = self._recorded_s = 0.0
        self._mfu_warned = False
        self._slow_in_a_row: dict[int, int] = {}
        self._begun_s = time.perf_counter()

    def __enter__(self) -> Log:
        facts = self._facts
        self._metrics.write("start", **asdict(facts))
        self._console.say(
            f"{facts.world} × {facts.device}: matrix products at {facts.matmul_flops_per_s / 1e9:,.0f} GFLOP/s in all "
            f"({facts.precision}), the measure of MFU"
        )
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
        with self._console.waiting("trackers finish"):
            self._trackers.close(failed=error is not None)

    def advance(self, loss: float, seconds: float, tokens: int) -> None:
        """A step is done, with this loss and in this time; `tokens` were trained on in all."""
        self._losses.append(loss)
        self._tokens = tokens
        self._step_s.append(seconds)
        if self._console.on_terminal:
            tokens_per_s = self._facts.tokens_per_step / seconds
            note = f"{duration(self._eta_s())} left  loss {loss:.4f}  {tokens_per_s:,.0f} tok/s"
            self._progress("steps", len(self._losses), self._facts.steps, note)

    def step(self, gradient_norm: float, learning_rate: float, interval: Interval) -> None:
        """Record the step that is done; `interval` covers it and those since the last that was recorded."""
        step = len(self._losses)
        record = StepRecord(
            **rates(self._facts, interval.seconds / interval.steps),
            step=step,
            loss=self._losses[-1],
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
            tokens=self._tokens,
            step_s=interval.seconds / interval.steps,
            data_wait_s=interval.data_wait_s / interval.steps,
            data_wait_share=interval.data_wait_s / interval.seconds,
            peak_memory_bytes=interval.peak_memory_bytes,
            eta_s=self._eta_s(),
            slowest_rank=interval.slowest.rank if interval.slowest else None,
            slowest_busy_s=interval.slowest.busy_s / interval.steps if interval.slowest else None,
            usual_busy_s=interval.slowest.usual_s / interval.steps if interval.slowest else None,
        )
        self._recorded_s += interval.seconds
        self._data_wait_s += interval.data_wait_s
        values = asdict(record)
        self._metrics.write("step", **values)
        known = {f"train/{name}": value for name, value in values.items() if name != "step" and value is not None}
        self._trackers.log(step, known)
        if self._rows == 0 or (self._console.on_terminal and self._rows % ROWS_PER_HEADER == 0):
            self._console.heading(self._table.header)
        self._rows += 1
        self._console.say(self._table.row(record))
        self._name_slow(interval)
        if record.mfu_full > 1 and not self._mfu_warned:
            self._mfu_warned = True
            self._console.warn(
                f"MFU is above 100% ({record.mfu_full:.1%} with full attention, {record.mfu_causal:.1%} causal): the "
                "matrix products measured at the start were too slow, as where another program ran beside them, or "
                "most of the operations counted are attention scores that a causal mask leaves out"
            )

    def _name_slow(self, interval: Interval) -> None:
        """Say once of a rank that it holds up the others."""
        slow = interval.slowest
        there = slow is not None and slow.busy_s > SLOW * slow.usual_s
        self._slow_in_a_row = {slow.rank: self._slow_in_a_row.get(slow.rank, 0) + 1} if slow and there else {}
        if slow and self._slow_in_a_row.get(slow.rank) == SLOW_RECORDS:
            self._console.warn(
                f"rank {slow.rank} is slow: busy for {slow.busy_s / interval.steps:.3g} s of a step, other ranks of "
                f"its stage for {slow.usual_s / interval.steps:.3g} s; they wait for it"
            )

    def say(self, text: str) -> None:
        """A line between those of the steps."""
        self._console.say(text)

    def warn(self, text: str) -> None:
        """A warning between the lines of the steps."""
        self._console.warn(text)

    def checkpoint(self, step: int, size_bytes: int, seconds: float, blocked_s: float) -> None:
        """The checkpoint of `step` is there."""
        self._console.say(
            f"checkpoint of step {step:,}: {size_bytes / 1e9:.3g} GB in {seconds:.2g} s, of which training waited "
            f"{blocked_s:.2g} s"
        )

    def rewind(self, step: int) -> None:
        """The steps after `step` are to be done again."""
        del self._losses[step:]
        self._validation = [(at, loss) for at, loss in self._validation if at <= step]

    def validation(self, loss: float) -> None:
        """Record the loss of the held-out text after the step that is done."""
        step = len(self._losses)
        self._validation.append((step, loss))
        self._progress.hide("validation")
        self._metrics.write("validation", step=step, loss=loss)
        self._trackers.log(step, {"validation/loss": loss})
        self._console.say(self._table.validation(step, loss))

    def validating(self, done: int, total: int) -> None:
        """So much of the held-out text has been looked at."""
        self._progress("validation", done, total)

    def end(self) -> Summary:
        """Record the end of the run and draw its loss curve."""
        known = [loss for loss in self._losses if math.isfinite(loss)] or [math.nan]
        summary = Summary(
            **rates(self._facts, median(self._step_s)),
            first_loss=known[0],
            last_loss=known[-1],
            validation_loss=self._validation[-1][1] if self._validation else None,
            steps=len(self._losses),
            tokens=self._tokens,
            seconds=time.perf_counter() - self._begun_s,
            data_wait_share=self._data_wait_s / self._recorded_s,
            run_dir=str(self._run_dir),
        )
        self._metrics.write("end", **asdict(summary))
        self._progress.stop()
        if len(self._losses) >= FEWEST_STEPS:
            self._draw(Curve(self._losses, self._validation))
        return summary

    def _draw(self, curve: Curve) -> None:
        console = self._console
        try:
            with console.waiting("drawing the loss curve"):
                save_svg(curve, self._run_dir / "loss.svg", self._run_dir.name)
                text = as_text(curve, console.width, console.colour) if not console.quiet else ""
            console.say(text)
        # A picture is not worth a run.
        except Exception as error:
            console.warn(f"the loss curve is not drawn: {type(error).__name__}: {error}")

    def _eta_s(self) -> float:
        return (self._facts.steps - len(self._losses)) * median(self._step_s[-ETA_STEPS:])


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Leaves of nested mappings by their dotted names; what is no number or text is written out."""
    leaves: dict[str, str | int | float | bool] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value if isinstance(value, str | int | float | bool) else str(value)
    return leaves
