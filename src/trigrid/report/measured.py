"""What a run has measured of itself, read from its folder at any time: before its end, after a failure, resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from trigrid.blueprint.flops import train_flops_per_token
from trigrid.job import load_job
from trigrid.report.goodput import account_of
from trigrid.report.history import NAME as METRICS
from trigrid.report.lines import read_lines
from trigrid.report.samples import Counted, Life, Sample, read_samples
from trigrid.spec.job import Job


class Spread(NamedTuple):
    """Quartiles of `number` values."""

    low: float
    median: float
    high: float
    number: int


@dataclass(frozen=True)
class Run:
    """What a run has measured of the steps of `job`, its last layout that has any.

    state, steps: of the whole run as `trigrid report` has them, "" and 0 where it does not know. others: lives in
    another layout, left out. step_s: without the first step of each life, unless there is no other (`cold`).
    products_Fps: FLOP/s of all ranks' matrix products when they started; flops_per_token: model FLOPs with full
    attention and causal. samples: those of the pooled lives; counted, unlike, unlike_ranks as in `Life`.
    """

    path: Path
    job: Job
    device: str
    cores: float | None
    state: str
    steps: int
    others: int
    step_s: Spread | None
    cold: bool
    tokens_per_step: int
    flops_per_token: tuple[float, float]
    products_Fps: float
    samples: tuple[Sample, ...]
    counted: tuple[Counted, ...]
    unlike: tuple[str, ...]
    unlike_ranks: int

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


def read_run(run_dir: Path, now_s: float) -> Run:
    """The run in `run_dir`, which has a job.toml. Raises Refused where that is no job."""
    lives = read_samples(run_dir)
    metrics = [entry for entry in read_lines(run_dir / METRICS) if entry["kind"] in ("start", "step")]
    starts = [entry for entry in metrics if entry["kind"] == "start"]
    if lives:
        stepped = {place for place, life in enumerate(lives) if any(True for _ in _steps(metrics, [life]))}
        last = lives[max(stepped, default=len(lives) - 1)]
        pooled = [life for life in lives if _alike(life, last)]
        others = sum(place in stepped and not _alike(life, last) for place, life in enumerate(lives))
    else:
        # A run of a version that wrote no samples: its last start.
        job = load_job(run_dir / "job.toml", env={})
        newest = starts[-1] if starts else {"time_s": 0.0}
        last = Life(job, str(newest.get("device", "")), None, float(newest["time_s"]), 0)
        pooled, others = [last], max(0, len(starts) - 1)
    warm, cold = list(_steps(metrics, pooled)), list(_steps(metrics, pooled, first=True))
    products = [start.get("matmul_flops_per_s") for start in starts if _within(start, pooled)]
    account = account_of(run_dir, now_s)
    job = last.job
    full, causal = (train_flops_per_token(job.model, job.batch.sequence, causal=causal) for causal in (False, True))
    return Run(
        path=run_dir,
        job=job,
        device=last.device,
        cores=last.cores,
        state=account.state if account else "",
        steps=account.steps if account else 0,
        others=others,
        step_s=spread(warm or cold),
        cold=not warm,
        tokens_per_step=job.batch.global_batch * job.batch.sequence,
        flops_per_token=(full, causal),
        products_Fps=float(products[-1] or 0.0) if products else 0.0,
        samples=tuple(sample for life in pooled for sample in life.samples),
        counted=next((life.counted for life in reversed(pooled) if life.counted), ()),
        unlike=tuple(dict.fromkeys(line for life in pooled for line in life.unlike)),
        unlike_ranks=max(life.unlike_ranks for life in pooled),
    )


def _alike(one: Life, other: Life) -> bool:
    """Whether their steps may be pooled."""

    def key(life: Life) -> tuple[object, ...]:
        job, run = life.job, life.job.run
        products = run.matmul_precision, run.compile
        numbers = (run.precision, *products, run.dropout, run.attention_dropout, run.check_copies)
        return job.model, job.parallel, job.batch, job.optimizer.frozen, numbers, life.device, life.cores

    return key(one) == key(other)


def _steps(metrics: Sequence[Mapping[str, Any]], lives: Sequence[Life], first: bool = False) -> Iterable[float]:
    """Seconds of a step by each line of metrics within `lives`, without the first line of each, or of those alone."""
    is_first = True
    for entry in metrics:
        if entry["kind"] == "start":
            is_first = True
        elif _within(entry, lives):
            if is_first == first and isinstance(entry.get("step_s"), float):
                yield entry["step_s"]
            is_first = False


def _within(entry: Mapping[str, Any], lives: Sequence[Life]) -> bool:
    return any(life.begin_s <= entry["time_s"] < life.stop_s for life in lives)


def spread(values: Sequence[float]) -> Spread | None:
    """Quartiles, with the extremes among the values; None of none."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0], 1) if values else None
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(low, middle, high, len(values))
