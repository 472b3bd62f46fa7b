"""Parity over many layouts: which ones, one after the other through a pool, and the table."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import cast, get_args

from trigrid.blueprint import decoder
from trigrid.check.parity import Verdict, judge, judge_bf16, layouts, reference, reshaped, run_rank
from trigrid.check.pool import Pool
from trigrid.errors import Problem, Refused
from trigrid.report.console import duration, table
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout, ZeroStage
from trigrid.spec.rules import check

LARGEST_MODEL = 50_000_000
NAMED = re.compile(r"(tp|pp|dp)(\d+)")


def choose(job: Job, names: str, zero: str, world: int, say: Callable[[str], None]) -> list[Layout]:
    """The layouts that `names` ("all", or a list such as "tp2pp2dp2,tp8") and `zero` ("0,1,2,3") mean.

    "all" leaves out what the rules do not allow for `job`, and tells `say`. Raises Refused for a name that means
    nothing or is not allowed, if nothing is left, and for a model that is too large to be compared in memory.
    """
    if (count := decoder(job.model).count) > LARGEST_MODEL:
        reason = f"parity compares whole gradients in memory: a model of at most {LARGEST_MODEL:,} parameters"
        raise Refused([Problem("model", f"{count:,} parameters", reason)])
    stages = [_stage(text) for text in zero.split(",")]
    if names == "all":
        every = list(layouts([2**n for n in range(world.bit_length()) if 2**n <= world], job.parallel, stages))
        problems = {layout: check(replace(job, parallel=layout)) for layout in every}
        legal = [layout for layout in every if not problems[layout]]
        if not legal:
            raise Refused([Problem("--layouts", names, f"no layout of up to {world} processes suits this job")])
        if left_out := [layout for layout in every if problems[layout]]:
            first = left_out[0]
            say(f"left out {len(left_out)} of {len(every)} layouts, as {layout_name(first)}: {problems[first][0]}")
        return legal
    chosen = []
    for name in names.split(","):
        degrees = {axis: int(degree) for axis, degree in NAMED.findall(name)}
        if not degrees or NAMED.sub("", name) or len(degrees) < len(NAMED.findall(name)):
            raise Refused([Problem("--layouts", name, "is no layout", ("all", "tp2pp2dp2", "tp4", "pp2dp4"))])
        tp, pp, dp = (degrees.get(axis, 1) for axis in ("tp", "pp", "dp"))
        for stage in stages:
            layout = reshaped(job.parallel, tp, pp, dp, stage)
            if problems_here := check(replace(job, parallel=layout)):
                raise Refused(problems_here)
            if layout.world > world:
                raise Refused([Problem("--world", world, f"{name} takes {layout.world} processes", (layout.world,))])
            chosen.append(layout)
    return chosen


def _stage(text: str) -> ZeroStage:
    for stage in get_args(ZeroStage):
        if text == str(stage):
            return cast(ZeroStage, stage)
    raise Refused([Problem("--zero", text, "is no ZeRO stage", get_args(ZeroStage))])


def run_matrix(job: Job, chosen: Sequence[Layout], say: Callable[[str], None]) -> list[Verdict]:
    """The verdict on each layout; `say` hears of each as it comes."""
    verdicts = []
    with Pool(max(layout.world for layout in chosen)) as pool:
        say(f"starting {pool.world} processes, running the single process")
        precision = job.run.precision
        ref = reference(job, pool)
        exact = replace(job, run=replace(job.run, precision="fp32"))
        wide = reference(exact, pool) if precision == "bf16" else None
        begun = time.monotonic()
        for done, layout in enumerate(chosen, start=1):
            this = replace(job, parallel=layout)
            runs = pool.run(run_rank, layout.world, this)
            verdicts.append(judge_bf16(this, runs, wide, ref) if wide else judge(this, runs, ref))
            left = (time.monotonic() - begun) / done * (len(chosen) - done)
            word = "ok" if verdicts[-1].passed else "FAILS"
            say(f"{done:>3} of {len(chosen)}  {layout_name(layout):<16} {word:<6} {duration(left)} to go")
    return verdicts


def layout_name(layout: Layout) -> str:
    return f"tp{layout.tp} pp{layout.pp} dp{layout.dp} z{layout.zero}"


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """One row per layout with its worst parameter, and a line that counts."""
    rows = [
        [
            layout_name(v.layout),
            f"{v.gradient_error:.3f}" if v.precision == "bf16" else f"{v.gradient_error:.1e}",
            v.parameter,
            "" if v.precision == "bf16" else f"{v.weight_error:.1e}",
            f"{v.loss_error:.1e}",
            f"{v.norm_error:.1e}",
            "ok" if v.passed else "FAILS",
        ]
        for v in verdicts
    ]
    measure = "distance ÷ alone" if verdicts[0].precision == "bf16" else "gradient"
    header = ["layout", measure, "worst parameter", "weights", "loss", "norm", ""]
    passed = sum(v.passed for v in verdicts)
    return (
        f"{table(header, rows)}\n{passed} of {len(verdicts)} layouts agree with one process ({verdicts[0].precision})"
    )


def as_json_value(verdict: Verdict) -> dict[str, object]:
    """The fields of a verdict; JSON has no NaN, so what was not measured or is not finite is null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in asdict(verdict).items()}
