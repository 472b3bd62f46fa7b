"""Parity over many jobs: which ones, one after the other through a pool, and the table."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import cast, get_args

from trigrid.blueprint import decoder
from trigrid.check.pairs import choices_of, covering
from trigrid.check.parity import (
    Reference,
    Verdict,
    judge,
    judge_bf16,
    layouts,
    reference,
    reshaped,
    run_rank,
    single,
)
from trigrid.check.pool import Pool
from trigrid.errors import Problem, Refused
from trigrid.plan.scheduled import job_schedule
from trigrid.report.console import duration, table
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout, ZeroStage
from trigrid.spec.rules import check

LARGEST_MODEL = 50_000_000
Options = Mapping[str, tuple[object, ...]]
"""What varies beside the layout, see `pairs.OPTIONS`; empty: nothing, a job keeps its own."""
NAMED = re.compile(r"(tp|pp|dp)(\d+)")


def choose(job: Job, names: str, zero: str, world: int, options: Options, say: Callable[[str], None]) -> list[Job]:
    """The jobs that `names` ("all", or a list such as "tp2pp2dp2,tp8"), `zero` ("0,1,2,3") and `options` mean.

    "all" is every layout of up to `world` processes, without what the rules do not allow for `job`, and tells `say`.
    Raises Refused for a name that means nothing or is not allowed, if nothing is left, and for a model that is too
    large to be compared in memory.
    """
    if (count := decoder(job.model).count) > LARGEST_MODEL:
        reason = f"parity compares whole gradients in memory: a model of at most {LARGEST_MODEL:,} parameters"
        raise Refused([Problem("model", f"{count:,} parameters", reason)])
    if options and job.parallel.schedule_file:
        reason = "pairs vary schedule and batch, which parallel.schedule_file lays down"
        raise Refused([Problem("--options", "pairs", reason, ("job",))])
    stages = [_stage(text) for text in zero.split(",")]
    chosen = _every(job, stages, world, say) if names == "all" else _named(job, names, stages, world)
    if not options:
        return [replace(job, parallel=layout) for layout in chosen]
    return covering(job, chosen, options)


def _every(job: Job, stages: Sequence[ZeroStage], world: int, say: Callable[[str], None]) -> list[Layout]:
    every = list(layouts(range(1, world + 1), job.parallel, stages))
    problems = {layout: _problems(replace(job, parallel=layout)) for layout in every}
    legal = [layout for layout in every if not problems[layout]]
    if not legal:
        raise Refused([Problem("--layouts", "all", f"no layout of up to {world} processes suits this job")])
    if left_out := [layout for layout in every if problems[layout]]:
        first = left_out[0]
        say(f"left out {len(left_out)} of {len(every)} layouts, as {layout_name(first)}: {problems[first][0]}")
    return legal


def _named(job: Job, names: str, stages: Sequence[ZeroStage], world: int) -> list[Layout]:
    chosen = []
    for name in names.split(","):
        degrees = {axis: int(degree) for axis, degree in NAMED.findall(name)}
        if not degrees or NAMED.sub("", name) or len(degrees) < len(NAMED.findall(name)):
            raise Refused([Problem("--layouts", name, "is no layout", ("all", "tp2pp2dp2", "tp4", "pp2dp4"))])
        tp, pp, dp = (degrees.get(axis, 1) for axis in ("tp", "pp", "dp"))
        for stage in stages:
            layout = reshaped(job.parallel, tp, pp, dp, stage)
            if problems := _problems(replace(job, parallel=layout)):
                raise Refused(problems)
            if layout.world > world:
                raise Refused([Problem("--world", world, f"{name} takes {layout.world} processes", (layout.world,))])
            chosen.append(layout)
    return chosen


def _problems(job: Job) -> Sequence[Problem]:
    """Every reason why the layout of `job` does not go with the rest of it."""
    problems = check(job)
    if not problems and job.parallel.schedule_file:
        try:
            job_schedule(job)
        except Refused as refused:
            return refused.problems
    return problems


def _stage(text: str) -> ZeroStage:
    for stage in get_args(ZeroStage):
        if text == str(stage):
            return cast(ZeroStage, stage)
    raise Refused([Problem("--zero", text, "is no ZeRO stage", get_args(ZeroStage))])


def run_matrix(jobs: Sequence[Job], say: Callable[[str], None]) -> list[Verdict]:
    """The verdict on each job against the single process that computes the same; `say` hears of each as it comes."""
    verdicts = []
    with Pool(max(job.parallel.world for job in jobs)) as pool:
        say(f"starting {pool.world} processes")
        alone: dict[Job, Reference] = {}

        def known(job: Job) -> Reference:
            if (key := single(job)) not in alone:
                alone[key] = reference(job, pool)
            return alone[key]

        begun = time.monotonic()
        for done, job in enumerate(jobs, start=1):
            runs = pool.run(run_rank, job.parallel.world, job)
            if job.run.precision == "bf16":
                wide = known(replace(job, run=replace(job.run, precision="fp32")))
                verdicts.append(judge_bf16(job, runs, wide, known(job)))
            else:
                verdicts.append(judge(job, runs, known(job)))
            left = (time.monotonic() - begun) / done * (len(jobs) - done)
            word = "ok" if verdicts[-1].passed else "FAILS"
            say(f"{done:>3} of {len(jobs)}  {layout_name(job.parallel):<16} {word:<6} {duration(left)} to go")
    return verdicts


def layout_name(layout: Layout) -> str:
    return f"tp{layout.tp} pp{layout.pp} dp{layout.dp} z{layout.zero}"


def options_name(job: Job, options: Options) -> str:
    """The choices of `job` that are not the first of their option, such as "recompute=full tied"."""
    chosen = [(key.split(".")[-1], value) for key, value in choices_of(job, options) if value != options[key][0]]
    return " ".join(_chosen(name, value) for name, value in chosen)


def _chosen(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return name if isinstance(value, tuple) else f"{name}={value}"


def verdict_table(jobs: Sequence[Job], verdicts: Sequence[Verdict], options: Options) -> str:
    """One row per job with its worst parameter, and a line that counts."""
    rows = [
        [
            layout_name(job.parallel),
            f"{v.gradient_error:.3f}" if v.precision == "bf16" else f"{v.gradient_error:.1e}",
            v.parameter,
            "" if v.precision == "bf16" else f"{v.weight_error:.1e}",
            f"{v.loss_error:.1e}",
            f"{v.norm_error:.1e}",
            "ok" if v.passed else "FAILS",
        ]
        for job, v in zip(jobs, verdicts, strict=True)
    ]
    precisions = sorted({v.precision for v in verdicts}, reverse=True)
    measure = "distance ÷ alone" if precisions == ["bf16"] else "gradient"
    lines = table(["layout", measure, "worst parameter", "weights", "loss", "norm", ""], rows).splitlines()
    # Behind the columns: options are long, and of any number.
    told = ["", *(options_name(job, options) for job in jobs)]
    text = "\n".join(f"{line}  {more}".rstrip() for line, more in zip(lines, told, strict=True))
    passed = sum(v.passed for v in verdicts)
    return f"{text}\n{passed} of {len(jobs)} jobs agree with one process ({', '.join(precisions)})"


def as_json_value(job: Job, verdict: Verdict) -> dict[str, object]:
    """The fields of a verdict and the job that was judged; JSON has no NaN, so what was not measured or is not finite
    is null."""
    fields = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in asdict(verdict).items()}
    return {**fields, "job": asdict(job)}
