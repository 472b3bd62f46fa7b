"""A comparison for people, whole or in a few lines, and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from trigrid.report.compare import Comparison, Figure, Memory
from trigrid.report.console import table
from trigrid.report.gaps import NAMES, memory_gap, time_gap
from trigrid.report.goodput import OPEN
from trigrid.report.measured import Spread
from trigrid.report.plan import MOST_STAGES, WIDTH
from trigrid.report.units import figures, rate, seconds, size

SCHEMA = "trigrid.compare/1"
NONE = "–"
UNMEASURED = "not measured"
DIFFERS = "DIFFERS"
SMALL = 0.03
"""Of a step: what takes less is not told in short."""
HOW = {
    "state": "state: storages of the engine's buckets and moments between two steps, to the byte",
    "kept": "kept: held between two actions beyond the step's begin, by {counter}; what is not the engine's is in it: "
    "small things of Python, and what the network has not let go of yet",
    "grown": "allocated: pages resident beyond those before the engine was built, an upper bound: what libraries load "
    "later and what the C library keeps free is in it",
    "allocated": "allocated, reserved: torch's largest since the start; device: all that was in use, by whomever",
}


def compare_text(found: Comparison) -> str:
    """All of it on a page."""
    gaps = [line for gap in (time_gap(found), memory_gap(found)) for line in wrap(gap, WIDTH)]
    blocks = [_head(found), _rates(found), _time(found), _stages(found), _memory(found), _traffic(found), gaps]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def short_text(found: Comparison) -> str:
    """What a run says of it at its end."""
    run, plan, step_s = found.run, found.plan, found.run.step_s
    parts, texts = found.parts[found.busiest], []
    if run.samples:
        whole = sum(part.measured or 0.0 for part in parts)
        shares = [(NAMES[part.name], (part.measured or 0.0) / whole) for part in parts]
        named = [f"{name} {share:.0%}" for name, share in sorted(shares, key=lambda s: -s[1]) if share >= SMALL]
        texts.append(f"a step: {'; '.join(named)}")
    if plan and step_s and found.same_machine:
        texts.append(f"planned {seconds(plan.step_s.best)}, measured {seconds(step_s.median)}. {time_gap(found)}")
    elif plan and not found.same_machine:
        texts.append(f"times are planned for {plan.machine.gpu.name}: `trigrid calibrate` measures this machine")
    texts.append(memory_gap(found))
    lines = [line for text in texts for line in wrap(text, WIDTH, subsequent_indent="  ")]
    return "\n".join([*lines, f"more: trigrid compare {run.path}"])


def _head(found: Comparison) -> list[str]:
    run, layout = found.run, found.run.job.parallel
    degrees = (("TP", layout.tp), ("PP", layout.pp), ("CP", layout.cp), ("DP", layout.dp))
    shape = " × ".join(f"{name} {size}" for name, size in degrees if size > 1 or name != "CP")
    schedule = f", {layout.schedule_file or layout.schedule}" if layout.pp > 1 else ""
    state = f"{run.steps:,} of {run.job.run.steps:,} steps, {run.state}; " if run.state else ""
    device = f"{layout.world:,} × {run.device}" if run.device else "an unknown device"
    lines = wrap(f"{run.name}: {state}{shape}, ZeRO-{layout.zero}{schedule} on {device}", WIDTH)
    if run.state == OPEN:
        lines.append("  under way: figures are of the steps so far")
    if run.others:
        lines.append(f"  {run.others} earlier {'start' if run.others == 1 else 'starts'} in another layout left out")
    if found.plan is None:
        lines += wrap(f"not planned: {found.unplanned}", WIDTH, initial_indent="  ", subsequent_indent="  ")
    elif not found.same_machine:
        lines.append(f"  planned for {found.plan.machine.gpu.name}, which is not what the run was on")
    if not run.samples:
        lines.append(
            "  no step is sampled: the run has not come to its second, or a version trained it that samples none"
        )
    return lines


def _rates(found: Comparison) -> list[str]:
    run, plan = found.run, found.plan
    world, tokens = run.job.parallel.world, run.tokens_per_step
    planned_s, step_s = (plan.step_s if plan else None), run.step_s
    best, middle = (planned_s.best if planned_s else None), (step_s.median if step_s else None)
    full, causal = run.flops_per_token

    def row(name: str, amount: float, say: Callable[[float], str]) -> list[str]:
        """A rate of `amount` in a step."""
        return [name, *(say(amount / time_s) if amount and time_s else NONE for time_s in (best, middle))]

    rows = [
        [
            "step",
            f"{seconds(planned_s.best)} ({_range(planned_s.best, planned_s.low, planned_s.high)})"
            if planned_s
            else NONE,
            f"{seconds(step_s.median)} ({_range(step_s.median, step_s.low, step_s.high)})" if step_s else NONE,
        ],
        row("tokens/s", tokens, figures),
        row("tokens/s per rank", tokens / world, figures),
        row("model FLOP/s per rank", tokens * full / world, rate),
    ]
    if plan and planned_s and found.same_machine:
        peak = "of the plan's peak"
        rows.append(row(f"MFU {peak}, full", plan.mfu_full_attention * planned_s.best, "{:.1%}".format))
        rows.append(row(f"MFU {peak}, causal", plan.mfu_causal * planned_s.best, "{:.1%}".format))
    if middle and run.products_Fps:
        for name, flops in (("full", full), ("causal", causal)):
            share = tokens * flops / middle / run.products_Fps
            rows.append([f"MFU of its own products, {name}", NONE, f"{share:.1%}"])
    notes = []
    if step_s:
        warm = "the first, which warms up, is the only one" if run.cold else "the first of each start left out"
        notes.append(f"measured: median and middle half of {step_s.number:,} records of steps, {warm}")
    if run.products_Fps:
        notes.append(f"its own products: {rate(run.products_Fps / world)} per rank when the run began")
    lines = table(["", "planned", "measured"], rows).splitlines()
    return [*(f"  {line.rstrip()}" for line in lines), *(f"  {note}" for note in notes)]


def _range(middle: float, low: float, high: float) -> str:
    """Two durations in the unit that `middle` is told in."""
    unit = 1.0 if middle >= 0.9995 else 1e3
    return f"{figures(low * unit)} – {figures(high * unit)}"


def _time(found: Comparison) -> list[str]:
    parts = found.parts[found.busiest]
    if not parts:
        return []
    planned = sum(part.planned or 0.0 for part in parts) or None
    measured = sum(part.measured or 0.0 for part in parts) or None
    rows = [
        [
            NAMES[part.name],
            *_share(part.planned, planned),
            *_share(part.measured, measured),
            f"{part.gap * 1e3:+,.1f} ms" if part.gap is not None else "",
        ]
        for part in parts
    ]
    rows.append(["all", *_share(planned, planned), *_share(measured, measured), ""])
    of = f" on stage {found.busiest}, which computes longest" if len(found.parts) > 1 else ""
    samples = len(found.run.samples)
    how = f"; measured: middle half of {samples:,} sampled, mean of its ranks" if samples else ""
    header = ["part", "planned", "", "measured", "", "more"]
    title = wrap(f"time of a step{of}{how}", WIDTH, initial_indent="  ", subsequent_indent="  ")
    return [*title, *(f"    {line.rstrip()}" for line in table(header, rows).splitlines())]


def _share(value: float | None, whole: float | None) -> tuple[str, str]:
    if value is None:
        return NONE, ""
    return seconds(value), f"{value / whole:.1%}" if whole else ""


def _stages(found: Comparison) -> list[str]:
    """Where stages differ: what each computes, and waits for the others."""
    if len(found.parts) < 2 or not found.run.samples:
        return []
    shown = list(range(len(found.parts)))
    if len(shown) > MOST_STAGES:
        shown = sorted({0, 1, shown[-2], shown[-1], found.busiest})
    rows = []
    for stage in shown:
        parts = {part.name: part for part in found.parts[stage]}
        row = [str(stage)]
        for name in ("compute", "pipeline"):
            part = parts.get(name) or Figure(name, 0.0, None, 0.0)
            row += [NONE if value is None else seconds(value) for value in (part.planned, part.measured)]
        rows.append(row)
    header = ["stage", "compute planned", "measured", "waits for stages planned", "measured"]
    return [f"  {line.rstrip()}" for line in table(header, rows).splitlines()]


def _memory(found: Comparison) -> list[str]:
    memory, run = found.fullest, found.run
    traced = any(figure.traced is not None for figure in memory.figures)
    rows = []
    for figure in memory.figures:
        cells = [_bytes(figure.planned), *([_bytes(figure.traced)] if traced else [])]
        bound = run.on_cpu and figure.name == "allocated"
        measured = UNMEASURED if figure.measured is None else f"{'≤ ' if bound else ''}{_bytes(figure.measured)}"
        rows.append([figure.name, *cells, measured, "" if bound else _off(figure)])
    header = ["memory", "planned", *(["traced"] if traced else []), "measured", ""]
    of = f" of a rank of stage {memory.stage}, the fullest" if len(found.memory) > 1 else " of a rank"
    lines = [f"  memory{of}", *(f"    {line.rstrip()}" for line in table(header, rows).splitlines())]
    if not run.samples:
        return lines
    counter = "the C library's count" if run.on_cpu else "torch's allocator"
    notes = [HOW["state"], HOW["kept"].format(counter=counter), HOW["grown" if run.on_cpu else "allocated"]]
    if memory.margin is not None and not run.on_cpu:
        notes.append(f"not modelled by the plan: ± {size(memory.margin)}")
    wrapped = [line for note in notes for line in wrap(note, WIDTH - 4, subsequent_indent="  ")]
    return [*lines, *(f"    {line}" for line in wrapped)]


def _bytes(value: float | None) -> str:
    return NONE if value is None else size(round(value))


def _off(figure: Figure) -> str:
    known = [value for value in (figure.planned, figure.traced, figure.measured) if value is not None]
    if figure.exact:
        return "" if len(set(known)) < 2 else DIFFERS
    if figure.gap is None or not figure.planned:
        return ""
    return f"{figure.gap / figure.planned:+.1%}"


def _traffic(found: Comparison) -> list[str]:
    """Payload of the first rank of the stage that computes longest, and what of any stage is not as planned."""
    if not found.traffic:
        return []
    mine = {figure.name: figure.measured or 0 for figure in found.traffic[found.busiest]}
    moved = [
        f"{name} {size(round(payload))} in {mine[f'{name} calls']:,}"
        for name, payload in ((n.removesuffix(" bytes"), v) for n, v in mine.items() if n.endswith(" bytes"))
    ]
    if not moved:
        return []
    differ = [
        f"stage {stage}: {figure.name} {figure.measured:,}, planned {figure.planned:,}"
        for stage, figures_ in enumerate(found.traffic)
        for figure in figures_
        if figure.gap
    ]
    verdict = f"{DIFFERS}: {'; '.join(differ)}" if differ else "as planned, calls and bytes"
    text = f"traffic of a step: {', '.join(moved)}: {verdict}"
    return wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def compare_json(found: Comparison) -> dict[str, Any]:
    """By the contract `trigrid.compare/1`: what is here stays, more may come. null: not known."""
    run, plan, layout = found.run, found.plan, found.run.job.parallel
    full, causal = run.flops_per_token
    middle = run.step_s.median if run.step_s else None
    tokens = run.tokens_per_step

    def mfu(amount: float) -> float | None:
        return tokens * amount / middle / run.products_Fps if middle and run.products_Fps else None

    return {
        "schema": SCHEMA,
        "run": {
            "name": run.name,
            "state": run.state or None,
            "steps": run.steps,
            "planned_steps": run.job.run.steps,
            "device": run.device or None,
            "cores_per_rank": run.cores,
            "earlier_starts_in_another_layout": run.others,
            "samples": len(run.samples),
            "first_steps_only": run.cold,
        },
        "layout": {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp, "zero": layout.zero},
        "planned_for": plan.machine.gpu.name if plan else None,
        "not_planned": found.unplanned or None,
        "same_machine": found.same_machine,
        "step_s": {
            "planned": _interval(plan.step_s.low, plan.step_s.best, plan.step_s.high) if plan else None,
            "measured": _spread(run.step_s),
        },
        "tokens_per_s": {
            "planned": plan.tokens_per_s if plan else None,
            "measured": tokens / middle if middle else None,
        },
        "mfu": {
            "planned": {"full_attention": plan.mfu_full_attention, "causal": plan.mfu_causal} if plan else None,
            "of_its_own_products": {"full_attention": mfu(full), "causal": mfu(causal)},
        },
        "parts_s": [[_figure(figure) for figure in parts] for parts in found.parts],
        "busiest_stage": found.busiest,
        "slowest": found.slowest._asdict() if found.slowest else None,
        "memory": [_stage(memory) for memory in found.memory],
        "traffic": [[_figure(figure) for figure in figures_] for figures_ in found.traffic],
        "unlike": list(run.unlike),
        "unlike_ranks": run.unlike_ranks,
        "largest_gap": {"time": time_gap(found), "memory": memory_gap(found)},
    }


def _interval(low: float, best: float, high: float) -> dict[str, float]:
    return {"low": low, "best": best, "high": high}


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return spread._asdict() if spread else None


def _figure(figure: Figure) -> dict[str, Any]:
    return asdict(figure)


def _stage(memory: Memory) -> dict[str, Any]:
    return {"stage": memory.stage, "margin_bytes": memory.margin, "figures": [_figure(f) for f in memory.figures]}
