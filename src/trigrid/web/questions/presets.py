"""`presets`: published runs with what was measured beside what is planned, and one that nobody has published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from trigrid.plan.figures import figures
from trigrid.plan.validate import evidence
from trigrid.spec.gpu import GIB
from trigrid.web.questions.draft import draft
from trigrid.web.questions.labels import label
from trigrid.web.questions.state import State


@dataclass(frozen=True, kw_only=True)
class PresetsInput:
    """Nothing is needed."""


@dataclass(frozen=True, slots=True)
class Told:
    """A figure that was measured."""

    figure: str
    """As in the figures of `plan`."""
    label: str
    """For people."""
    unit: str
    """Of both numbers."""
    measured: float
    """As published."""
    predicted: float
    """By the plan."""
    error: float
    """predicted ÷ measured − 1."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A run to begin with."""

    name: str
    """A short name."""
    title: str
    """For people."""
    words: str
    """What is open, or otherwise to be known."""
    state: State
    """The page's state."""
    source: str
    """Where it was published; empty: nowhere."""
    figures: list[Told]
    """What was measured; none where nothing was."""


@dataclass(frozen=True, slots=True)
class Presets:
    """Runs to begin with."""

    presets: list[Preset]
    """In order of size."""


class Run(NamedTuple):
    """A run as a state. row: of the evidence; figures: those of the plan that its columns tell, and the factor to the
    figure's unit."""

    name: str
    title: str
    words: str
    row: str
    state: State
    figures: Mapping[str, tuple[str, float]] = {}


STEP = {"step_s": ("step_time_s", 1.0)}
RUNS = (
    Run(
        "8b-on-8",
        "Llama 3.1 8B on 8 GPUs",
        "torchtitan, FSDP2 and torch.compile, selective recomputation, on an H100 of 96 GB and 500 W",
        "ttp-002",
        State(
            model="llama3.1-8b",
            gpus=8,
            software="fsdp2-compiled",
            values={
                "cluster.gpu": "h100-96g-500w",
                "parallel.tp": 1,
                "parallel.pp": 1,
                "parallel.zero": 3,
                "parallel.recompute": "selective",
                "batch.sequence": 8192,
                "batch.global_batch": 16,
                "batch.micro_batch": 2,
            },
        ),
        {**STEP, "tokens_per_s_per_gpu": ("tokens_per_s_per_gpu", 1.0), "memory.reserved": ("peak_mem_gib", GIB)},
    ),
    Run(
        "175b-on-64",
        "GPT-3 175B on 64 GPUs",
        "Megatron-LM with sequence parallelism and selective recomputation, on an A100 of 80 GB; padded vocabulary",
        "kor22-004",
        State(
            model="gpt3-175b",
            gpus=64,
            software="megatron-2022",
            values={
                "cluster.gpu": "a100-80g",
                "parallel.tp": 8,
                "parallel.pp": 8,
                "parallel.zero": 0,
                "parallel.schedule": "interleaved",
                "parallel.virtual_stages": 3,
                "parallel.recompute": "selective",
                "batch.sequence": 2048,
                "batch.global_batch": 64,
                "batch.micro_batch": 1,
            },
        ),
        {**STEP, "mfu_full_attention": ("mfu_pct", 0.01)},
    ),
    Run(
        "1t-on-512",
        "Megatron 1T on 512 GPUs",
        "Megatron-LM with sequence parallelism and selective recomputation, on an A100 of 80 GB",
        "kor22-008",
        State(
            model="megatron-1t",
            gpus=512,
            software="megatron-2022",
            values={
                "cluster.gpu": "a100-80g",
                "parallel.tp": 8,
                "parallel.pp": 64,
                "parallel.zero": 0,
                "parallel.schedule": "1f1b",
                "parallel.recompute": "selective",
                "batch.sequence": 2048,
                "batch.global_batch": 512,
                "batch.micro_batch": 1,
            },
        ),
        {**STEP, "mfu_full_attention": ("mfu_pct", 0.01)},
    ),
    Run(
        "405b-on-16384",
        "Llama 3 405B on 16,384 GPUs",
        "what is not published is taken for granted: seven virtual stages of a modified interleaved schedule, no "
        "recomputation; NICs of 400 Gb/s",
        "ll3-002",
        State(
            model="llama3-405b",
            gpus=16_384,
            software="megatron",
            tokens="15T",
            values={
                "cluster.gpu": "h100",
                "parallel.tp": 8,
                "parallel.pp": 16,
                "parallel.zero": 1,
                "parallel.schedule": "interleaved",
                "parallel.virtual_stages": 7,
                "parallel.recompute": "none",
                "batch.sequence": 8192,
                "batch.global_batch": 2048,
                "batch.micro_batch": 1,
            },
        ),
        {"mfu_full_attention": ("mfu_pct", 0.01)},
    ),
    Run(
        "1t-on-10000",
        "A model of 1T on 10,000 GPUs",
        "10,000 GPUs at TP 8 are 1,250 = 2 · 5⁴ groups: uneven stages, or spare GPUs; no such run is published",
        "",
        State(
            params="1T",
            gpus=10_000,
            tokens="15T",
            values={
                "cluster.gpu": "h100",
                "parallel.tp": 8,
                "parallel.pp": 25,
                "parallel.zero": 1,
                "parallel.schedule": "interleaved",
                "parallel.virtual_stages": 2,
                "parallel.recompute": "full",
                "batch.sequence": 8192,
                "batch.global_batch": 2000,
                "batch.micro_batch": 1,
            },
        ),
    ),
)


def presets(_: PresetsInput) -> Presets:
    """Runs to begin with."""
    return _presets()


@cache
def _presets() -> Presets:
    rows = {row["id"]: row for row in evidence()}
    return Presets([_preset(run, rows.get(run.row, {})) for run in RUNS])


def _preset(run: Run, row: Mapping[str, str]) -> Preset:
    drafted = draft(run.state)
    known = figures(drafted.plan, drafted.tokens)
    told = []
    for figure, (column, factor) in run.figures.items():
        (predicted, unit), published = known[figure], float(row[column]) * factor
        told.append(Told(figure, label(figure), unit, published, predicted, predicted / published - 1))
    return Preset(run.name, run.title, run.words, run.state, row.get("source", "").partition(": ")[0], told)
