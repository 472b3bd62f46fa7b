"""The loss curve of a run, as text and as SVG."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

FEWEST_STEPS = 5
"""Fewer make no curve."""
TEXT_SIZE = (100, 18)
TICKS = 7
SVG_POINTS = 2_000


@dataclass(frozen=True)
class Curve:
    """training: the loss of each step, from step 1, NaN where it is not known; validation: (step, loss)."""

    training: Sequence[float]
    validation: Sequence[tuple[int, float]]


def as_text(curve: Curve, width: int, colour: bool) -> str:
    """The curve in characters, at most `width` columns wide, with a terminal's colours where `colour`."""
    import plotext  # type: ignore[import-untyped]

    width = min(width, TEXT_SIZE[0])
    last = len(curve.training)
    ticks = sorted({1 + round((last - 1) * i / TICKS) for i in range(TICKS + 1)})
    # plotext has one figure, for all who use it.
    figure = plotext.figure
    figure.clear.all()
    figure.plot_size(width, TEXT_SIZE[1])
    figure.theme("simple" if colour else "colorless")
    figure.draw(figure.signal(*thinned(curve.training, 2 * width)).lines())
    if curve.validation:
        steps, losses = zip(*curve.validation, strict=True)
        figure.draw(figure.signal(list(steps), list(losses), marker="●"))
    figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])
    figure.label("step", axis="x")
    figure.title("training loss" + (" and validation loss (●)" if curve.validation else ""))
    text: str = figure.build().string()
    figure.clear.all()
    if colour:
        return text.rstrip()
    return "\n".join(line.rstrip() for line in plotext.uncolorize(text).rstrip().splitlines())


def save_svg(curve: Curve, path: Path, title: str) -> None:
    """The curve as a picture; equal curves give equal files."""
    # Without a home to write to, matplotlib takes a temporary folder and logs that it does.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Text stays text, and names of elements do not depend on chance.
    with rc_context({"svg.hashsalt": "trigrid", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.plot(*thinned(curve.training, SVG_POINTS), label="training", linewidth=1.2)
        if curve.validation:
            axes.plot(*zip(*curve.validation, strict=True), "o", label="validation", markersize=4)
        axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
        aside = path.with_name(f".{path.name}")
        figure.savefig(aside, format="svg", metadata={"Date": None})
    os.replace(aside, path)


def thinned(losses: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """Steps and losses of at most `most` points, each the mean of as many neighbouring steps as that takes; steps
    without a finite loss are left out."""
    run = math.ceil(len(losses) / most)
    points = []
    for start in range(0, len(losses), run):
        if finite := [loss for loss in losses[start : start + run] if math.isfinite(loss)]:
            points.append((1 + start + (min(run, len(losses) - start) - 1) / 2, fmean(finite)))
    return [step for step, _ in points], [loss for _, loss in points]
