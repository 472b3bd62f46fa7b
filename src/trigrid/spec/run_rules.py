"""What goes with what in the run of a job, as `rules` has it of model, batch and layout."""

from __future__ import annotations

from collections.abc import Iterator

from trigrid.errors import Problem
from trigrid.spec.job import Job
from trigrid.spec.layout import SPLIT_BACKWARD

AT_ONCE = "backwards, and a graph of run.compile has all of its gradients at once"


def run_problems(job: Job) -> list[Problem]:
    """Every reason why optimizer, data, run and faults of `job` do not go with each other."""
    return [p for rule in (_optimizer, _data, _faults) for p in rule(job)]


def compile_problems(job: Job) -> Iterator[Problem]:
    """What of the layout run.compile does not go with."""
    layout = job.parallel
    if job.run.compile and layout.schedule in (*SPLIT_BACKWARD, "auto") and not layout.schedule_file:
        splits = "may split" if layout.schedule == "auto" else "splits"
        whole = "1f1b" if layout.virtual_stages == 1 else "interleaved"
        yield Problem("parallel.schedule", layout.schedule, f"{splits} {AT_ONCE}", (whole,))


def _optimizer(job: Job) -> Iterator[Problem]:
    steps, warmup = job.run.steps, job.optimizer.warmup_steps
    if warmup >= steps:
        yield Problem("optimizer.warmup_steps", warmup, f"must be below run.steps = {steps}", (steps - 1,))


def _data(job: Job) -> Iterator[Problem]:
    corpus, weights = job.data.corpus, job.data.weights
    if weights and len(weights) != len(corpus):
        reason = f"one weight is needed for each of the {len(corpus)} corpora of data.corpus"
        yield Problem("data.weights", list(weights), reason, ("[] (all documents alike)",))
    if job.run.trace_step > job.run.steps:
        reason = f"is after the last step, run.steps = {job.run.steps}"
        yield Problem("run.trace_step", job.run.trace_step, reason, (job.run.steps, 0))
    if job.run.validate_every and not job.data.validation_fraction:
        yield Problem(
            "run.validate_every", job.run.validate_every, "needs data.validation_fraction above 0, and it is 0", (0,)
        )


def _faults(job: Job) -> Iterator[Problem]:
    for key in ("on_nan", "on_spike"):
        if getattr(job.faults, key) == "rewind" and not job.checkpoint.every:
            reason = "there is no checkpoint to go back to: checkpoint.every is 0"
            yield Problem(f"faults.{key}", "rewind", reason, ("skip" if key == "on_nan" else "ignore",))
    if job.faults.on_spike == "rewind" and job.checkpoint.keep < 2:
        reason = "a spike may follow on the newest checkpoint, which then has what led to it: faults.on_spike needs two"
        yield Problem("checkpoint.keep", job.checkpoint.keep, reason, (2,))
