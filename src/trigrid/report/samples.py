"""samples.jsonl: what some steps of a run took and held, by category, on every pipeline stage.

One JSON object a line, only ever appended to, by rank 0:

start    the ranks start: the job as TOML, the steps that are done, the device, on CPUs the cores of each rank
counted  state and traffic of the first rank of each stage, as counted in the first step sampled since then, and again
         where a later one is not as planned
sample   the seconds of a step by part, means over the ranks of each stage; its largest peaks of memory; who was slowest
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from trigrid.errors import Refused
from trigrid.job import job_from_text
from trigrid.ledger import STATE
from trigrid.plan.state import rank_state
from trigrid.plan.traffic import step_traffic
from trigrid.report.lines import read_lines
from trigrid.spec.job import Job

NAME = "samples.jsonl"
PARTS = {
    "compute": "forward, backward and what is recomputed, launches included",
    "tp": "tensor parallelism's collectives, as far as they are waited for",
    "zero": "weights gathered and gradients reduced for each use, as far as they are waited for",
    "pipeline": "messages of other stages are waited for: bubble, late stages, the wires",
    "reduce": "gradients reduced once a step, beyond the last backward",
    "gather": "updated weights gathered",
    "tied": "the tied embedding's sum",
    "optimizer": "norm, clipping, AdamW",
    "others": "what every rank must come to: the shape of the step, the norm",
    "data": "the batch is not there yet",
    "other": "all that is between these",
}
"""Parts of a step on one rank, whose sum it is."""
PEAKS = ("allocated", "reserved", "device", "resident", "grown", "kept")
"""Bytes. allocated, reserved: by torch on CUDA since the start; device: in use on the device, by whomever; resident: of
the process since its start; grown: of it, beyond what was resident before the engine was built; kept: between two
actions of the step, beyond what was held at its begin. What is not known on a device is 0."""


class Slowest(NamedTuple):
    """The rank that works longest compared with the others of its stage, and how long they do, on average."""

    rank: int
    busy_s: float
    peers_s: float


@dataclass(frozen=True)
class Counted:
    """What one rank holds between two steps and moves in one, by the names of `planned_counts`."""

    rank: int
    numbers: Mapping[str, int]


@dataclass(frozen=True)
class Sample:
    """One step. parts_s, peaks: of each pipeline rank in order, means and largest over the ranks alike."""

    step: int
    step_s: float
    parts_s: tuple[Mapping[str, float], ...]
    peaks: tuple[Mapping[str, int], ...]
    slowest: Slowest | None


@dataclass(frozen=True)
class Life:
    """The ranks from one start on, in `job`, until `stop_s` or for now. unlike: what was not as planned, of some ranks
    by name; unlike_ranks: how many they were at most. cores: of each rank, None where ranks have
    a GPU each. counted: the first rank of each stage."""

    job: Job
    device: str
    cores: float | None
    begin_s: float
    done: int
    stop_s: float = float("inf")
    samples: tuple[Sample, ...] = ()
    counted: tuple[Counted, ...] = ()
    unlike: tuple[str, ...] = ()
    unlike_ranks: int = 0


def planned_counts(job: Job, rank: int) -> dict[str, int]:
    """Bytes of state of `rank` by category, and calls and payload bytes of its step by axis and kind."""
    state = rank_state(job, rank)
    moved = {
        f"{axis} {kind} {what}": n
        for (axis, kind), count in step_traffic(job, rank).items()
        for what, n in (("calls", count.calls), ("bytes", count.payload_bytes))
    }
    return {name: state[name] for name in STATE} | moved


def read_samples(run_dir: Path) -> list[Life]:
    """The lives of the run in `run_dir`, by time; none where it has no samples. Lines that are torn, or of a version
    with another form, are left out."""
    lives: list[Life] = []
    for entry in read_lines(run_dir / NAME):
        try:
            if entry["kind"] == "start":
                if lives:
                    lives[-1] = replace(lives[-1], stop_s=float(entry["time_s"]))
                job, cores = job_from_text(entry["job"]), entry["cores"]
                begin_s, done = float(entry["time_s"]), int(entry["step"])
                lives.append(Life(job, str(entry["device"]), None if cores is None else float(cores), begin_s, done))
            elif lives:
                lives[-1] = _after(lives[-1], entry)
        except (KeyError, TypeError, ValueError, AttributeError, Refused):
            continue
    return lives


def _after(life: Life, entry: Mapping[str, Any]) -> Life:
    if entry["kind"] == "sample":
        return replace(life, samples=(*life.samples, _sample(entry)))
    if entry["kind"] == "counted":
        counted = tuple(Counted(int(s["rank"]), {k: int(v) for k, v in s["counted"].items()}) for s in entry["stages"])
        unlike = tuple(dict.fromkeys([*life.unlike, *map(str, entry["unlike"])]))
        ranks = max(life.unlike_ranks, int(entry["unlike_ranks"]))
        return replace(life, counted=counted, unlike=unlike, unlike_ranks=ranks)
    return life


def _sample(entry: Mapping[str, Any]) -> Sample:
    slowest = entry["slowest"]
    return Sample(
        step=int(entry["step"]),
        step_s=float(entry["step_s"]),
        parts_s=tuple({part: float(stage[part]) for part in PARTS} for stage in entry["parts_s"]),
        peaks=tuple({peak: int(stage[peak]) for peak in PEAKS} for stage in entry["peaks"]),
        slowest=Slowest(int(slowest["rank"]), float(slowest["busy_s"]), float(slowest["peers_s"])) if slowest else None,
    )
