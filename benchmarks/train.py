"""trigrid's engine beside plain PyTorch and other trainers: tokens per CPU-second and per second, and memory.

    python benchmarks/train.py [--peers VENV] [--layouts tp2,3d] [--only plain,megatron] [--pairs N] [--json FILE]

All train the same Llama (7.9 million parameters) from the same weights on the same tokens, with the same AdamW, in fp32
with the same products, one thread a process, over gloo. In a layout the processes of all contestants are started once
and take turns of a few steps, in one order and then in the reverse, so that each round gives a pair for every
contestant: its turn and trigrid's. A ratio is trigrid's tokens per CPU-second (of all ranks, system time included) over
the contestant's, the median of the pairs with its 95 % interval (bootstrap). CPU seconds hardly change when the machine
does something else; wall seconds do, and eight processes on few cores measure the scheduler as well.

Every loss is compared with plain PyTorch's at the same step, and the parameters that each rank holds with its share:
equal losses do not prove a layout. Peak RSS is less what imports had made resident, of the largest rank; peak live
bytes are what torch's allocator has given out at the fullest moment of the second step, in runs of their own.

Results go to standard output as a table in Markdown. Exit code 1: a contestant failed, or its losses are off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from peers.common import LAYOUTS, WORKLOAD
from train_crews import CONTESTANTS, OURS, Contestant, Crew, Failed, Means, Turn

from trigrid.report.console import Console

RESAMPLES = 2000
WATCHED_STEPS = 2
# Of a rank's share: what tensor parallelism does not cut, and stages that are not quite equal.
HELD_MARGIN = 1.01
MIB = 2**20


class Ratio(NamedTuple):
    """A median of pairs with its 95 % interval."""

    median: float
    low: float
    high: float


@dataclass
class Cell:
    """One contestant in one layout. loss_off: largest difference to plain PyTorch's loss of any step; held, resident,
    live: of each rank (parameters; bytes over those after imports; bytes); failed: why there is nothing."""

    layout: str
    contestant: str
    about: dict[str, str] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    loss_off: float = 0.0
    resident_bytes: list[int] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)
    failed: str = ""

    @property
    def whole(self) -> bool:
        """Whether ranks hold more than their share of the parameters."""
        share = CONTESTANTS[self.contestant].cut_of(self.layout).held
        return bool(self.held) and max(self.held) > HELD_MARGIN * share

    @property
    def loss_fits(self) -> bool:
        return self.loss_off <= CONTESTANTS[self.contestant].loss_limit(self.layout)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of paired rates, ours over theirs."""
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(median(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Ratio(median(pairs), medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1])


def run_layout(
    layout: str, contestants: Sequence[Contestant], means: Means, pairs: int, steps: int, say: Callable[[str], None]
) -> list[Cell]:
    """The cells of `layout`, by contestant."""
    cells = {c.name: Cell(layout, c.name) for c in contestants}
    with TemporaryDirectory() as folder:
        _watch(layout, contestants, cells, means, Path(folder, "watched"), say)
        if pairs:
            _time(layout, contestants, cells, means, (pairs, steps), Path(folder, "timed"), say)
    for cell in cells.values():
        both = zip(cell.losses, cells["plain"].losses, strict=False)
        cell.loss_off = max((abs(mine - plain) for mine, plain in both), default=0.0)
    return list(cells.values())


def _watch(
    layout: str,
    contestants: Sequence[Contestant],
    cells: dict[str, Cell],
    means: Means,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Live bytes and what is held, of one contestant after another."""
    for contestant in contestants:
        say(f"{layout}: live bytes of {contestant.name}")
        cell = cells[contestant.name]
        with Crew(contestant, layout, means, folder / contestant.name, watched=True) as crew:
            try:
                told = crew.ready()
                torch, plains = told[0]["torch"], cells["plain"].about.get("torch")
                if plains and torch != plains:
                    raise Failed(f"{contestant.name} has torch {torch}, plain PyTorch has {plains}")
                cell.about = {name: told[0][name] for name in ("version", "settings", "torch")}
                cell.held = [rank["held"] for rank in told]
                crew.turn(WATCHED_STEPS)
                cell.losses, cell.live_bytes = crew.losses, crew.live_bytes
            except Failed as failed:
                cell.failed = str(failed)
                say(str(failed))


def _time(
    layout: str,
    contestants: Sequence[Contestant],
    cells: dict[str, Cell],
    means: Means,
    amount: tuple[int, int],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Turns of all contestants that did not fail."""
    pairs, steps = amount
    crews: dict[str, Crew] = {}
    with ExitStack() as stack:

        def tried(name: str, work: Callable[[Crew], Any]) -> Any:
            try:
                return work(crews[name])
            except Failed as failed:
                del crews[name]
                cells[name].failed = str(failed)
                say(str(failed))

        def in_turn(number: int) -> None:
            for name in list(crews)[:: -1 if number % 2 else 1]:
                turn = tried(name, lambda crew: crew.turn(steps))
                if number and turn:
                    cells[name].turns.append(turn)

        for contestant in contestants:
            if not cells[contestant.name].failed:
                crew = Crew(contestant, layout, means, folder / contestant.name)
                crews[contestant.name] = stack.enter_context(crew)
        say(f"{layout}: starting {sum(crew.contestant.cut_of(layout).world for crew in crews.values())} processes")
        told = {name: tried(name, Crew.ready) for name in list(crews)}
        # The first turn warms up.
        for number in range(pairs + 1):
            say(f"{layout}: round {number} of {pairs}")
            in_turn(number)
        for name, crew in crews.items():
            cell = cells[name]
            cell.losses = crew.losses
            ranks = zip(crew.peak_bytes, told[name], strict=True)
            cell.resident_bytes = [peak - rank["imported_bytes"] for peak, rank in ranks]


COLUMNS = (
    "layout",
    "contestant",
    "tokens per CPU-s",
    "trigrid ÷ it [95 %]",
    "tokens/s",
    "trigrid ÷ it, wall [95 %]",
    "loss off by",
    "held, M",
    "RSS − imports, MiB",
    "live, MiB",
)


def table(cells: Sequence[Cell]) -> str:
    """In Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, cells, (_ours(cells, cell) for cell in cells))]
    notes = [
        f"- {cell.contestant} {cell.about['version']}, {cell.layout}: {cell.about['settings']}"
        for cell in cells
        if cell.about.get("settings")
    ]
    marks = [
        f"- † {cell.contestant}, {cell.layout}: a rank holds {max(cell.held) / 1e6:.2f} M parameters; its share is "
        f"{CONTESTANTS[cell.contestant].cut_of(cell.layout).held / 1e6:.2f} M"
        for cell in cells
        if cell.whole
    ]
    failures = [f"- {cell.failed}" for cell in cells if cell.failed]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([rows, "", *notes, *marks, *failures])


def _ours(cells: Sequence[Cell], cell: Cell) -> Cell:
    return next(c for c in cells if c.layout == cell.layout and c.contestant == OURS)


def _row(cell: Cell, ours: Cell) -> tuple[str, ...]:
    head = (cell.layout, f"**{OURS}**" if cell is ours else cell.contestant)
    if cell.failed:
        return (*head, "fails", *[""] * (len(COLUMNS) - 3))
    rates = ["", "", "", ""]
    if cell.turns:
        per_cpu, per_s = [turn.per_cpu_s for turn in cell.turns], [turn.per_s for turn in cell.turns]
        rates[0], rates[2] = f"{median(per_cpu):,.0f}", f"{median(per_s):,.0f}"
        if cell is not ours and not ours.failed:
            rates[1] = _interval(ratio([turn.per_cpu_s for turn in ours.turns], per_cpu))
            rates[3] = _interval(ratio([turn.per_s for turn in ours.turns], per_s))
    return (
        *head,
        *rates,
        f"{cell.loss_off:.0e}" + ("" if cell.loss_fits else " **off**"),
        f"{max(cell.held) / 1e6:.2f}" + (" †" if cell.whole else ""),
        f"{max(cell.resident_bytes) / MIB:,.0f}" if cell.resident_bytes else "",
        f"{max(cell.live_bytes) / MIB:,.0f}",
    )


def _interval(found: Ratio) -> str:
    return f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"


def as_json(cells: Sequence[Cell], means: Means, pairs: int, steps: int) -> dict[str, Any]:
    def of(cell: Cell) -> dict[str, Any]:
        mine, theirs = _ours(cells, cell).turns, cell.turns
        ratios = {}
        if len(mine) == len(theirs) > 0 and cell.contestant != OURS:
            ratios["cpu"] = ratio([t.per_cpu_s for t in mine], [t.per_cpu_s for t in theirs])._asdict()
            ratios["wall"] = ratio([t.per_s for t in mine], [t.per_s for t in theirs])._asdict()
        return {**asdict(cell), "ratios": ratios, "more_than_its_share": cell.whole, "loss_fits": cell.loss_fits}

    return {
        "workload": asdict(WORKLOAD),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "matmul": means.matmul,
        "pairs": pairs,
        "steps_of_a_turn": steps,
        "load_average": os.getloadavg(),
        "cells": [of(cell) for cell in cells],
    }


def _named(text: str, among: Sequence[str], parser: argparse.ArgumentParser, option: str) -> list[str]:
    names = text.split(",") if text else list(among)
    for name in names:
        if name not in among:
            parser.error(f"{option} {name}: not one of {', '.join(among)}")
    return [name for name in among if name in names]


def _contestants(
    given: argparse.Namespace, parser: argparse.ArgumentParser, say: Callable[[str], None]
) -> list[Contestant]:
    """Those that are asked for and can run; plain, which losses are compared with, and trigrid always."""
    asked = _named(given.only, list(CONTESTANTS), parser, "--only")
    found = []
    for name, contestant in CONTESTANTS.items():
        lacks = ""
        if not contestant.own and not given.peers:
            lacks = "--peers names no environment"
        elif contestant.needs and not os.environ.get(contestant.needs):
            lacks = f"{contestant.needs} names no checkout of it"
        if name in asked and lacks:
            if given.only:
                parser.error(f"--only {name}: {lacks}")
            say(f"without {name}: {lacks}")
        elif name in asked or name in ("plain", OURS):
            found.append(contestant)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="VENV", help="what the peers are installed in, see docs/speed.md")
    parser.add_argument("--layouts", default="", help=f"of {', '.join(LAYOUTS)}; all, if left out")
    parser.add_argument("--only", default="", help=f"of {', '.join(CONTESTANTS)}; all that can run, if left out")
    parser.add_argument("--pairs", type=int, default=10, help="rounds in which each takes a turn (10); 0: memory alone")
    parser.add_argument("--steps", type=int, default=2, help="of a turn (2)")
    matmul = ("highest", "high", "medium")
    parser.add_argument("--matmul", default="highest", choices=matmul, help="precision of fp32 products (highest)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well, after each layout")
    given = parser.parse_args()
    if given.pairs < 0 or given.steps < 1:
        parser.error("--pairs is 0 or more, --steps 1 or more")
    python = given.peers / "bin" / "python" if given.peers else None
    if python and not python.exists():
        parser.error(f"--peers {given.peers}: there is no {python}")
    say = Console().say
    contestants = _contestants(given, parser, say)
    means = Means(python, given.matmul)
    cells: list[Cell] = []
    for layout in _named(given.layouts, list(LAYOUTS), parser, "--layouts"):
        here = [c for c in contestants if layout in c.layouts]
        cells += run_layout(layout, here, means, given.pairs, given.steps, say)
        if given.json:
            given.json.write_text(json.dumps(as_json(cells, means, given.pairs, given.steps), indent=2) + "\n")
    print(table(cells))
    return 1 if any(cell.failed or not cell.loss_fits for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
