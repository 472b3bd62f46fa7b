"""What a search found, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from trigrid.plan.around import Around, Move, Recompute, Why
from trigrid.plan.changes import Change
from trigrid.plan.explain import Explanation
from trigrid.plan.found import Candidate, Found
from trigrid.plan.plan import TIGHT, Plan
from trigrid.plan.setup import Setup
from trigrid.report.console import table
from trigrid.report.plan import WIDTH, verdict
from trigrid.report.units import figures, gib, seconds
from trigrid.spec.gpu import GIB

RUNNERS_UP = 4
MUCH_SLOWER = 1.2
"""Layouts that take more than this many times as long are not told."""
MOST_OF_FRONT = 8


def layout_text(setup: Setup) -> str:
    """A layout in one short line."""
    parts = [f"TP{setup.tp}", f"PP{setup.pp}", *([f"CP{setup.cp}"] if setup.cp > 1 else []), f"DP{setup.dp}"]
    if setup.ep > 1:
        parts.append(f"EP{setup.ep}")
    zero = f"ZeRO-{setup.zero}"
    if setup.zero == 3 and not setup.gather_per_use:
        zero += "/step"
    if setup.reduce_per_microbatch != (setup.zero >= 2):
        zero += " reduce/" + ("microbatch" if setup.reduce_per_microbatch else "step")
    if setup.dp_replicate > 1:
        zero += f" ×{setup.dp_replicate}"
    schedule = f"{setup.schedule} v{setup.virtual}" if setup.virtual > 1 else setup.schedule
    piped = [schedule] if setup.pp > 1 else []
    return " ".join([*parts, zero, *piped, f"mb{setup.micro_batch}", f"recompute {setup.recompute_text}"])


def search_lines(
    found: Found,
    plan: Plan,
    whys: Sequence[Why],
    changes: Sequence[Change],
    batch: tuple[int, Candidate] | None,
    assumed: Sequence[str],
) -> list[str]:
    """What stands between the answer and the details where layouts were searched."""
    answer, how = found_text(found)
    lines = [f"  {answer}", *_wrapped(how, "  ")]
    for sentence in assumed:
        lines += _wrapped(f"assumed: {sentence}", "  ")
    for why in whys:
        lines += _wrapped(f"{why.knob} {why.value}: {why.reason}", "    ")
    lines += _others(found, plan)
    if found.spare_gpus:
        lines += _wrapped(spare_text(found, batch), "  ")
    if not found.ranked:
        lines += change_lines(changes)
    return lines


def found_text(found: Found) -> tuple[str, str]:
    """Which layout was chosen, and of how many."""
    counts = found.counts
    if not found.ranked:
        nearest = f"nearest of {counts.legal:,} legal layouts: {layout_text(found.chosen.setup)}"
        return nearest, "none fits: this is the one that needs least memory"
    return (
        f"best of {counts.legal:,} legal layouts: {layout_text(found.chosen.setup)}",
        f"{counts.priced:,} were priced, the others are too slow or too large by a bound; {counts.replayed:,} were "
        f"replayed{'' if found.proved else ', and not all that a bound leaves open'}",
    )


def front_text(found: Found, front: Sequence[Candidate]) -> str:
    """The fastest layouts for less and less memory, against the best."""
    if not front:
        return "\n".join(found_text(found))
    head = f"  the fastest of {found.counts.legal:,} legal layouts for less and less memory"
    return "\n".join([head, *_candidates(front, found.chosen)])


def _others(found: Found, plan: Plan) -> list[str]:
    lines: list[str] = []
    others = _distinct(found.ranked) if found.ranked else []
    if others:
        lines.append("  runners-up")
        lines += _candidates(others, found.chosen)
    front = found.front[:MOST_OF_FRONT]
    if len(front) > 1:
        lines.append("  less memory for more time (Pareto front)")
        lines += _candidates(front, found.chosen)
    if found.ranked and verdict(plan) == TIGHT:
        safe = found.within(plan.ceiling_bytes - plan.fullest.margin_bytes)
        if safe:
            lines.append("  with the margin left free (SAFE)")
            lines += _candidates([safe], found.chosen)
    runs = found.trainable()
    if found.ranked and runs is not None and runs is not found.chosen:
        lines.append("  the fastest of these that `trigrid train` runs today")
        lines += _candidates([runs], found.chosen)
    return lines


def _distinct(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The next best layouts: the first of each set of degrees, then others of the same degrees."""
    best = ranked[0]
    near = [candidate for candidate in ranked if candidate.step_s <= MUCH_SLOWER * best.step_s]
    found: dict[tuple[int, ...], Candidate] = {}
    for candidate in near:
        found.setdefault(_degrees(candidate), candidate)
    others = list(found.values())[1 : RUNNERS_UP + 1]
    more = [candidate for candidate in near[1:] if candidate not in others]
    return sorted([*others, *more[: RUNNERS_UP - len(others)]], key=lambda candidate: candidate.step_s)


def _degrees(candidate: Candidate) -> tuple[int, ...]:
    setup = candidate.setup
    return setup.tp, setup.cp, setup.pp, setup.dp, setup.ep


def _candidates(candidates: Sequence[Candidate], best: Candidate) -> list[str]:
    return [
        f"    {seconds(c.step_s):>8} {c.step_s / best.step_s - 1:+6.1%} {gib(c.bytes):>6} GiB  {layout_text(c.setup)}"
        for c in candidates
    ]


def spare_text(found: Found, batch: tuple[int, Candidate] | None) -> str:
    """How many GPUs are left over, and a near global batch that would use them."""
    setup = found.chosen.setup
    nodes, rest = divmod(found.spare_gpus, found.space.job.cluster.gpus_per_node)
    spare = f"{found.spare_gpus:,} of {found.space.gpus:,} GPUs"
    if nodes and not rest:
        spare += f" ({nodes:,} nodes)" if nodes > 1 else " (a node)"
    text = f"{spare} are spare: {setup.world:,} are used"
    if batch is None:
        return text
    size, candidate = batch
    before = found.space.job.batch.global_batch / found.chosen.step_s
    gain = size / candidate.step_s / before - 1
    return (
        f"{text}; a global batch of {size:,} would use {candidate.setup.world:,}: "
        f"{gain:+.1%} tokens/s, {layout_text(candidate.setup)}"
    )


def change_lines(changes: Sequence[Change]) -> list[str]:
    """Single changes that make it fit."""
    if not changes:
        return ["  no single change of a knob, of the cluster or of the accelerator makes it fit"]
    lines = ["  it fits with any one of these"]
    width = max(len(change.what) for change in changes)
    for change in changes:
        text = f"{change.what:{width}}  {seconds(change.step_s):>8} {gib(change.bytes):>6} GiB  "
        lines += _wrapped(text + layout_text(change.setup), "    ")
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


# Tables of single questions


def explanation_text(found: Explanation) -> str:
    """A figure with its formula, inputs and source."""
    inputs = ", ".join(f"{name} = {_plain(value)}" for name, value in found.inputs.items())
    in_bytes = found.unit == "bytes"
    value = f"{found.value / GIB:,.3f} GiB ({found.value:,.0f} bytes)" if in_bytes else _plain(found.value)
    unit = "" if in_bytes else f" {found.unit}"
    rows = (("formula", found.formula), ("inputs", inputs), ("source", found.source))
    lines = [f"{found.figure} = {value}{unit}"]
    for name, text in rows:
        lines += wrap(f"  {name:8} {text}", WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    return "\n".join(lines)


def _plain(value: object) -> str:
    """An input as it is, but for digits of a fraction that say nothing."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value.is_integer() or abs(value) >= 1e5 else f"{value:.6g}"


def sensitivity_text(around: Around, moves: Sequence[Move]) -> str:
    """Each knob one notch up and down: step and memory beside what they are."""
    here, ceiling = around.here, around.ceiling
    rows = [["as planned", "", seconds(here.step_s), "", gib(here.bytes), "", _fits(here.bytes, ceiling)]]
    notes = []
    for move in moves:
        if move.price is None:
            notes.append(f"{move.knob} {move.value} is not legal: {move.illegal}")
            continue
        step, peak = move.price.step_s, move.price.bytes
        rows.append(
            [
                move.knob,
                move.value,
                seconds(step),
                f"{step / here.step_s - 1:+.1%}",
                gib(peak),
                f"{(peak - here.bytes) / GIB:+.1f}",
                _fits(peak, ceiling),
            ]
        )
    text = table(["knob", "value", "step", "", "GiB", "", ""], rows)
    wrapped = [line for note in notes for line in wrap(note, WIDTH, subsequent_indent="  ")]
    return "\n".join([line.rstrip() for line in text.splitlines()] + wrapped)


def _fits(peak: float, ceiling: float) -> str:
    return "fits" if peak <= ceiling else "does not fit"


def recompute_text(rows: Sequence[Recompute]) -> str:
    """Kinds of recomputation, that which saves most for its time first."""
    cells = [
        [
            row.what,
            gib(row.bytes),
            gib(row.saved_bytes),
            seconds(row.step_s),
            f"{row.cost:+.1%}",
            figures(row.gib_per_percent) if row.saved_bytes else "",
        ]
        for row in rows
    ]
    text = table(["recomputation", "GiB", "saved", "step", "", "GiB per %"], cells)
    return "\n".join(line.rstrip() for line in text.splitlines())


# JSON


def candidate_json(candidate: Candidate) -> dict[str, object]:
    """A layout with its price."""
    setup = candidate.setup
    return {
        "step_s": candidate.step_s,
        "memory_bytes": round(candidate.bytes),
        "layout": {
            **{name: getattr(setup, name) for name in ("tp", "cp", "pp", "dp", "ep", "dp_replicate", "zero")},
            "gather": "per_use" if setup.gather_per_use else "per_step",
            "reduce": "per_microbatch" if setup.reduce_per_microbatch else "per_step",
            "schedule": setup.schedule,
            "virtual_stages": setup.virtual,
            "micro_batch": setup.micro_batch,
            "recompute": setup.recompute,
        },
    }


def search_json(
    found: Found, whys: Sequence[Why], changes: Sequence[Change], batch: tuple[int, Candidate] | None
) -> dict[str, object]:
    """The search beside the plan of its best layout."""
    counts, runs = found.counts, found.trainable()
    return {
        "open": sorted(found.space.open),
        "gpus": found.space.gpus,
        "spare_gpus": found.spare_gpus,
        "candidates": {
            "legal": counts.legal,
            "priced": counts.priced,
            "fitting": counts.fitting,
            "replayed": counts.replayed,
        },
        "proved": found.proved,
        "runners_up": [candidate_json(c) for c in (_distinct(found.ranked) if found.ranked else ())],
        "front": [candidate_json(c) for c in found.front],
        "trainable": candidate_json(runs) if runs else None,
        "why": [{"knob": why.knob, "value": why.value, "reason": why.reason} for why in whys],
        "changes_that_fit": [
            {"what": c.what, **candidate_json(Candidate(c.step_s, c.bytes, c.setup))} for c in changes
        ],
        "nearest_global_batch": {"global_batch": batch[0], **candidate_json(batch[1])} if batch else None,
    }


def moves_json(around: Around, moves: Sequence[Move]) -> list[dict[str, object]]:
    """Each knob one notch up and down."""
    return [
        {
            "knob": move.knob,
            "value": move.value,
            "step_s": move.price.step_s if move.price else None,
            "memory_bytes": round(move.price.bytes) if move.price else None,
            "fits": move.price.bytes <= around.ceiling if move.price else False,
            "illegal": move.illegal or None,
        }
        for move in moves
    ]


def recompute_json(rows: Sequence[Recompute]) -> list[dict[str, object]]:
    """Kinds of recomputation."""
    return [
        {
            "what": row.what,
            "memory_bytes": round(row.bytes),
            "saved_bytes": round(row.saved_bytes),
            "step_s": row.step_s,
            "cost_of_step": row.cost,
            "gib_per_percent": row.gib_per_percent if row.saved_bytes else None,
        }
        for row in rows
    ]
