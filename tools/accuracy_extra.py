"""Two tables of docs/accuracy.md: what repeated measurements differ by, and published runs that state no step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import fmean, median

from trigrid.blueprint.flops import train_flops_per_token
from trigrid.plan.machine import make_machine
from trigrid.plan.rows import Case
from trigrid.plan.setup import Setup
from trigrid.plan.software import SOFTWARE
from trigrid.plan.step import Step
from trigrid.plan.validate import RowResult
from trigrid.spec.gpu import load_gpu
from trigrid.spec.models import load_model

# Llama 3 Herd, arXiv:2407.21783, Table 4: GPUs, cp, dp, sequence, sequences per dp rank, published MFU.
HERD = ((8192, 1, 64, 8192, 32, 0.43), (16384, 1, 128, 8192, 16, 0.41), (16384, 16, 8, 131072, 16, 0.38))


def noise(results: Sequence[RowResult], cases: Mapping[str, Case], held_out: set[str]) -> list[str]:
    """Layouts that were measured more than once, in one source or in several, and the least error that any planner can
    have on them: it gives one figure for all of a group, at best the middle of their logarithms."""
    lines = [
        "## What repeated measurements differ by",
        "",
        "Rows that state the same model, layout, software and machine. No planner is nearer to them on average than",
        "the last column but one: it has one figure for all of them. Where some are fitted and others held out, one",
        "that meets the fitted ones exactly is off by the last column on the others.",
        "",
        "| figure | sources | layouts | rows | median spread | largest spread | least mean error | held out, at best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in ("time", "memory"):
        groups: dict[object, list[RowResult]] = {}
        for row in results:
            if row.time_used if kind == "time" else row.memory_used:
                case = cases[row.id]
                spec = case.spec.name if case.spec.experts else (case.spec.hidden, case.spec.layers, case.spec.heads)
                network = (case.nic_Bps, case.fabric) if kind == "time" else ()
                place = (case.gpu.name, case.format, *network)
                groups.setdefault((spec, case.setup, case.software, place, row.meter), []).append(row)
        by_source: dict[str, list[list[RowResult]]] = {}
        for rows in groups.values():
            if len(rows) > 1:
                by_source.setdefault(", ".join(sorted({row.source for row in rows})), []).append(rows)
        for sources, several in sorted(by_source.items()):
            spreads, least, apart = [], [], []
            for rows in several:
                found = [_measured(row, kind) for row in rows]
                middle = exp(fmean(map(log, found)))
                spreads.append(max(found) / min(found) - 1)
                least += [abs(middle / one - 1) for one in found]
                known = [log(_measured(row, kind)) for row in rows if row.id not in held_out]
                others = [_measured(row, kind) for row in rows if row.id in held_out]
                apart += [abs(exp(fmean(known)) / one - 1) for one in others if known]
            lines.append(
                f"| {kind} | {sources} | {len(several)} | {len(least)} | {median(spreads):.1%} | {max(spreads):.1%} | "
                f"{fmean(least):.1%} | {f'{fmean(apart):.1%}' if apart else ''} |"
            )
    return [*lines, ""]


def doubted(results: Sequence[RowResult], cases: Mapping[str, Case]) -> list[str]:
    """Figures that are not scored though the row is planned."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in results:
        case = cases.get(row.id)
        for why in (case.time_doubt, case.memory_doubt) if case else ():
            if why:
                found.setdefault((row.source, why), []).append(row.id)
    lines = ["## Figures not scored", "", "| rows | why |", "|---|---|"]
    return [*lines, *(f"| {', '.join(ids)} | {why} |" for (_, why), ids in sorted(found.items())), ""]


def herd() -> list[str]:
    """Llama 3 405B as published, with Megatron's kernels, by virtual stages, which the paper does not state."""
    spec, machine, software = load_model("llama3-405b"), make_machine(load_gpu("h100")), SOFTWARE["megatron"]
    lines = [
        "## Llama 3 405B (arXiv:2407.21783, Table 4)",
        "",
        "Not scored: recomputation, virtual stages and the counting of attention are not stated. TP 8, PP 16, BF16,",
        "no recomputation, one sequence a microbatch, Megatron's kernels; MFU with full and with causal attention.",
        "Without virtual stages the pipeline idles for 15/16 of its work at 16 microbatches, and full recomputation",
        "costs a further quarter: plans of 26 to 34 % have one or both. Stages are as even as 126 blocks allow; with",
        "8 the first and the last hold none, as published.",
        "",
        "| GPUs | sequence | microbatches | virtual | step | idle | exposed TP | MFU full | MFU causal | published |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for gpus, cp, dp, sequence, microbatches, published in HERD:
        for virtual in (1, 2, 4, 8):
            setup = Setup(
                tp=8,
                cp=cp,
                pp=16,
                dp=dp,
                virtual=virtual,
                schedule="interleaved" if virtual > 1 else "1f1b",
                microbatches=microbatches,
                sequence=sequence,
                stage_layers=(0, *(1,) * 126, 0) if virtual == 8 else (),
            )
            timed = Step(spec, machine, software).time(setup, play=True)
            tokens = dp * microbatches * sequence
            mfu = [
                train_flops_per_token(spec, sequence, causal=causal)
                * tokens
                / (timed.step_s * gpus * machine.gpu.peak_flops["bf16"])
                for causal in (False, True)
            ]
            parts = timed.parts_s
            lines.append(
                f"| {gpus:,} | {sequence:,} | {microbatches} | {virtual} | {timed.step_s:.2f} s | "
                f"{parts['idle'] / timed.step_s:.0%} | {parts['tp'] / timed.step_s:.0%} | "
                f"{mfu[0]:.1%} | {mfu[1]:.1%} | {published:.0%} |"
            )
    return [*lines, ""]


def _measured(row: RowResult, kind: str) -> float:
    found = row.measured_step_s if kind == "time" else row.measured_memory_bytes
    assert found is not None
    return found
