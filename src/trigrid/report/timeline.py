"""A timeline as a picture: in characters for a terminal, as SVG for a paper."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from xml.sax.saxutils import escape

from trigrid.errors import Problem, Refused
from trigrid.report.units import seconds
from trigrid.schedule import Kind, Timeline

LEGEND = "F forward, B backward, I of the input alone, W of the weights alone; blank: idle"
LATER = "lower case: stages of a rank after its first"
COLOURS = {Kind.FORWARD: "#4c78a8", Kind.BACKWARD: "#f58518", Kind.INPUT: "#f58518", Kind.WEIGHT: "#9d9da1"}
WORDS = dict(zip(Kind, ("forward", "backward", "input backward", "weight backward"), strict=True))
SVG_WIDTH, ROW, LEFT, RIGHT, TOP = 900, 18, 64, 84, 28
NARROWEST_NUMBER = 14
"""Pixels of an action that shows its microbatch."""


def timeline_text(timeline: Timeline, width: int) -> str:
    """A row for each rank, at most `width` columns: each character is what its rank does longest in that time."""
    ranks = len(timeline.busy_s)
    label = len(f"rank {ranks - 1} ")
    columns = max(10, width - label - len(" |100.0% idle"))
    rows = [f"{f'rank {rank}':{label}}|{cells}|" for rank, cells in enumerate(_cells(timeline, columns))]
    idle = [f"{share:6.1%} idle" for share in timeline.idle_shares]
    several = len(timeline.order.schedule.placement) > ranks
    scale = f"{'':{label}}0{f'{seconds(timeline.step_s)}':>{columns + 1}}"
    legend = f"{LEGEND}; {LATER}" if several else LEGEND
    return "\n".join([*map("".join, zip(rows, idle, strict=True)), scale, *wrap(legend, width)])


def _cells(timeline: Timeline, columns: int) -> list[str]:
    first = _first_stages(timeline)
    shares: list[list[dict[str, float]]] = [[{} for _ in range(columns)] for _ in timeline.busy_s]
    step_s = timeline.step_s or 1.0
    for rank, action, start_s, end_s in timeline.spans:
        mark = str(action.kind) if action.stage == first[rank] else str(action.kind).lower()
        start, end = (t / step_s * columns for t in (start_s, end_s))
        for column in range(int(start), min(columns, int(end) + 1)):
            cell = shares[rank][column]
            cell[mark] = cell.get(mark, 0.0) + max(0.0, min(end, column + 1) - max(start, column))
    return ["".join(map(_mark, row)) for row in shares]


def _mark(cell: dict[str, float]) -> str:
    """What fills most of a character's time; a blank where that is nothing."""
    most = max(cell, key=cell.__getitem__, default=" ")
    return most if cell and cell[most] >= 1 - sum(cell.values()) else " "


def _first_stages(timeline: Timeline) -> list[int]:
    placement = timeline.order.schedule.placement
    return [placement.index(rank) for rank in range(len(timeline.busy_s))]


def write_svg(timeline: Timeline, path: Path, title: str) -> None:
    """The timeline as a picture; equal timelines give equal files. Raises Refused where it cannot be written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text("\n".join(_svg(timeline, title)) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise Refused([Problem("svg", path, f"cannot be written: {error.strerror}")]) from None


def _svg(timeline: Timeline, title: str) -> Iterator[str]:
    ranks, step_s = len(timeline.busy_s), timeline.step_s or 1.0
    inner, bottom = SVG_WIDTH - LEFT - RIGHT, TOP + ranks * ROW
    scale = inner / step_s
    first = _first_stages(timeline)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SVG_WIDTH} {bottom + 52}" '
        'font-family="sans-serif" font-size="11">'
    )
    yield f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>'
    shapes: dict[tuple[Kind, bool], list[str]] = {}
    numbers: list[str] = []
    for rank, (kind, stage, m), start_s, end_s in timeline.spans:
        x, width, y = LEFT + start_s * scale, (end_s - start_s) * scale, TOP + rank * ROW + 1
        shape = f"M{x:.2f} {y}h{width:.2f}v{ROW - 2}h-{width:.2f}z"
        shapes.setdefault((kind, stage != first[rank]), []).append(shape)
        if width >= NARROWEST_NUMBER:
            numbers.append(f'<text x="{x + width / 2:.2f}" y="{y + ROW - 6}">{m}</text>')
    for (kind, later), paths in shapes.items():
        light = ' fill-opacity="0.6"' if later else ""
        yield f'<path fill="{COLOURS[kind]}"{light} stroke="white" stroke-width="0.4" d="{"".join(paths)}"/>'
    if numbers:
        yield f'<g font-size="9" fill="white" text-anchor="middle">{"".join(numbers)}</g>'
    for rank, share in enumerate(timeline.idle_shares):
        y = TOP + rank * ROW + 13
        yield f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">rank {rank}</text>'
        yield f'<text x="{SVG_WIDTH - RIGHT + 6}" y="{y}">{share:.1%} idle</text>'
    yield f'<path fill="none" stroke="black" d="M{LEFT} {bottom + 2}h{inner}"/>'
    for tick in range(5):
        x, at = LEFT + inner * tick / 4, step_s * tick / 4
        yield f'<text x="{x:.2f}" y="{bottom + 16}" text-anchor="middle">{seconds(at) if at else "0"}</text>'
    x = LEFT
    for kind in [kind for kind in Kind if any(used is kind for used, _ in shapes)]:
        yield f'<rect x="{x}" y="{bottom + 30}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{x + 16}" y="{bottom + 40}">{WORDS[kind]}</text>'
        x += 110
    if any(later for _, later in shapes):
        yield f'<text x="{x}" y="{bottom + 40}">lighter: stages of a rank after its first</text>'
    yield "</svg>"
