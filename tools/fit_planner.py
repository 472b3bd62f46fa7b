"""Fit the planner's constants on stated (source, model) groups and report the others.

    python tools/fit_planner.py                   fit, write src/trigrid/plan/constants.toml and docs/accuracy.md
    python tools/fit_planner.py --report          only write docs/accuracy.md, with the constants as they are
    python tools/fit_planner.py --leave-one-out   also fit once more without each source, for the page alone

Coordinate descent and an evolution strategy on the sum of Huber losses of log(predicted / measured), in closed form,
with a pull to what is known beforehand. Each constant stays within its bounds, and only rows that can feel it are
planned again. A developer's tool: it is not part of the package.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

from accuracy_page import accuracy_page

from trigrid.plan.constants import constants
from trigrid.plan.facts import Unplannable
from trigrid.plan.rows import Case, read_case, source_of
from trigrid.plan.validate import Planner, RowResult, evidence, judge, log_error, validate

ROOT = Path(__file__).parents[1]
Say = Callable[[str], None]
HUBER = 0.08
# What is known beforehand (modelling.md, data sheets), by the first part of a name. Where rows say little, a constant
# stays near it: leaving it by its whole range costs as much as RIDGE of the loss.
PRIORS = {
    "hbm": 0.8,
    "products": 0.95,
    "launch": 1e-5,
    "nvlink": 0.75,
    "nic": 0.75,
    "hop.nvlink_s": 3e-6,
    "hop.nic_s": 1e-5,
    "step": 0.01,
    "launch.blocking": 2e-5,
    "gemm.half_k": 60.0,
    "attention.half_sequence": 300.0,
    "attention.unfused.half_k": 64.0,
    "memory.context_bytes": 4.5e8,
    "memory.communicator_bytes": 4e8,
    "memory.workspace_bytes": 1e8,
    "memory.reserved_share": 0.9,
    "memory.reserved_share_pipeline": 0.85,
}
RIDGE = 0.008
# Not fitted: from theory or from what no row here can tell.
FIXED = {
    "jitter.share",
    "overlap.slowdown",
    "interval.time",
    "interval.memory",
    "memory.reserved_share_expandable",
    "memory.context_bytes_early",
    "memory.pair_bytes",
    "attention.unaligned.volta",
    "attention.unaligned.ampere",
    "attention.unaligned.hopper",
}
# Which constants are of time; the others are of memory.
TIME_ONLY = ("gemm", "products", "attention", "hbm", "launch", "nvlink", "nic", "hop", "overlap", "step", "moe")
GENERATIONS = ("early", "deepspeed", "eager", "fused")
HARDWARE = ("volta", "ampere", "hopper", "blackwell")


@dataclass(frozen=True)
class Row:
    """A scored row: what is compared, and how it is planned."""

    case: Case
    kind: str
    measured: float

    @property
    def group(self) -> tuple[str, str]:
        return self.case.source, self.case.model

    def loss(self, planner: Planner) -> float:
        predicted = planner.seconds(self.case) if self.kind == "time" else planner.memory_bytes(self.case)
        size = abs(log_error(predicted, self.measured))
        return size * size / 2 if size < HUBER else HUBER * (size - HUBER / 2)


def strain(values: Mapping[str, float], names: Iterable[str]) -> float:
    """What it costs that constants leave what is known beforehand."""
    table, total = constants(), 0.0
    for name in names:
        prior = PRIORS.get(name, PRIORS.get(name.split(".")[0]))
        if prior is not None:
            total += RIDGE * ((values[name] - prior) / (table[name].high - table[name].low)) ** 2
    return total


def feels(name: str, row: Row) -> bool:
    """Whether the constant `name` can move `row`."""
    if (row.kind == "time") != name.startswith(TIME_ONLY):
        return False
    parts = name.split(".")
    case = row.case
    for part in parts[1:]:
        if part in HARDWARE and part != case.gpu.generation:
            return False
        if (
            part in GENERATIONS
            and parts[0] in ("hbm", "launch", "step", "products")
            and part != case.software.generation
        ):
            return False
        if part in ("flash1", "flash2") and (
            not case.software.kernels.fused_attention or part != case.software.attention
        ):
            return False
    many = case.setup.world > case.gpus_per_node
    if name.startswith(("nic.", "hop.nic")) and not many:
        return False
    if parts[0] == "nic" and (parts[1] if parts[1].startswith("opa") else "") != case.fabric:
        return False
    if parts[0] == "launch" and (parts[1] == "blocking") != case.software.blocking:
        return False
    if name == "attention.half_sequence" and not case.software.kernels.fused_attention:
        return False
    if name.startswith("attention.unfused") and case.software.kernels.fused_attention:
        return False
    if parts[0] == "gemm" and parts[-1].startswith("fp8") and case.format != parts[-1]:
        return False
    if name.startswith("moe") and not case.spec.experts:
        return False
    if name.startswith(("memory.context", "memory.communicator")) and case.meter in ("allocated", "reserved"):
        return False
    if name.startswith("memory.context") and name.endswith("early") != (
        case.software.generation in ("early", "deepspeed")
    ):
        return False
    if name.startswith("memory.reserved_share"):
        return case.meter != "allocated" and name.endswith("pipeline") == (case.setup.pp > 1)
    return True


def scored(rows: Iterable[Mapping[str, str]]) -> list[Row]:
    """Every comparison that counts."""
    planner, found = Planner(), []
    for values in rows:
        result = judge(values, planner)
        if not result.used:
            continue
        try:
            case = read_case(values)
        except Unplannable:
            continue
        if result.time_used and case.measured_step_s:
            found.append(Row(case, "time", case.measured_step_s))
        if result.memory_used and case.measured_memory_bytes:
            found.append(Row(case, "memory", case.measured_memory_bytes))
    return found


def fit_groups(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """The (source, model) groups that constants are fitted on: of each source every other one, the largest first."""
    chosen: set[tuple[str, str]] = set()
    for source in sorted({row.case.source for row in rows}):
        counts = Counter(row.group for row in rows if row.case.source == source)
        chosen |= set(sorted(counts, key=lambda group: (-counts[group], group))[::2])
    return chosen


def balanced(rows: Sequence[Row]) -> dict[int, float]:
    """Weights: a source counts as the root of its number of rows, so that none drowns the others."""
    sizes: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (row.case.source, row.kind)
        sizes[key] = sizes.get(key, 0) + 1
    return {i: sizes[row.case.source, row.kind] ** -0.5 for i, row in enumerate(rows)}


def fit(rows: Sequence[Row], start: Mapping[str, float], sweeps: int, say: Say) -> dict[str, float]:
    """Constants near `start` that fit `rows`."""
    values, weights = dict(start), balanced(rows)
    table = constants()
    touched = {n: [i for i, row in enumerate(rows) if feels(n, row)] for n in table if n not in FIXED}
    steps = {name: 0.25 for name in table}

    def losses(which: Sequence[int]) -> list[float]:
        planner = Planner(dict(values))
        return [weights[i] * rows[i].loss(planner) for i in which]

    current = losses(range(len(rows)))
    for sweep in range(sweeps):
        before = sum(current)
        for name, which in touched.items():
            if len(which) < 2 or steps[name] < 0.01:
                continue
            bound, old = table[name], values[name]
            now, moved = sum(current[i] for i in which) + strain(values, [name]), False
            for sign in (1, -1):
                reach = steps[name] * (bound.high - bound.low)
                values[name] = min(bound.high, max(bound.low, old + sign * reach))
                if values[name] == old:
                    continue
                trial = losses(which)
                if sum(trial) + strain(values, [name]) < now - 1e-9:
                    for i, loss in zip(which, trial, strict=True):
                        current[i] = loss
                    moved = True
                    break
                values[name] = old
            steps[name] *= 1.2 if moved else 0.5
        say(f"sweep {sweep}: {before:.4f} -> {sum(current):.4f}")
        if before - sum(current) < 1e-5:
            break
    return values


def wander(rows: Sequence[Row], start: Mapping[str, float], tries: int, seed: int, say: Say) -> dict[str, float]:
    """A (1+1) evolution strategy (Rechenberg's fifth rule): coordinates alone cannot follow valleys that run across."""
    draw, weights, table = Random(seed), balanced(rows), constants()
    names = [n for n in table if n not in FIXED and sum(feels(n, row) for row in rows) > 1]

    def total(values: Mapping[str, float]) -> float:
        planner = Planner(values)
        return sum(weights[i] * row.loss(planner) for i, row in enumerate(rows)) + strain(values, names)

    best, width = dict(start), 0.08
    lowest = total(best)
    for i in range(tries):
        trial = dict(best)
        for name in draw.sample(names, min(len(names), 6)):
            bound = table[name]
            moved = best[name] + draw.gauss(0.0, width) * (bound.high - bound.low)
            trial[name] = min(bound.high, max(bound.low, moved))
        loss = total(trial)
        if loss < lowest:
            best, lowest, width = trial, loss, min(0.3, width * 1.5)
        else:
            width = max(0.004, width * 0.92)
        if i % 100 == 99:
            say(f"try {i}: {lowest:.4f}, width {width:.3f}")
    return best


def fitted(
    rows: Sequence[Row],
    start: Mapping[str, float],
    sweeps: int,
    tries: int,
    say: Say,
    kinds: Sequence[str] = ("time", "memory"),
    seeds: int = 1,
) -> dict[str, float]:
    """Constants for time and for memory, which share none: the mean over `seeds` searches, since valleys are flat."""
    values = dict(start)
    for kind in kinds:
        used = [row for row in rows if row.kind == kind]
        if not used:
            continue
        first = fit(used, values, sweeps, say)
        found = [fit(used, wander(used, first, tries, seed, say), 3, say) for seed in range(seeds)]
        values = {name: fmean(one[name] for one in found) for name in values}
    return values


def write_constants(values: Mapping[str, float], rows: Sequence[Row]) -> None:
    """Put `values` and the sources of the rows that each was fitted on in the constants' file."""
    path = ROOT / "src" / "trigrid" / "plan" / "constants.toml"
    header = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    lines = [*header, ""]
    for name, constant in constants().items():
        felt = sorted({row.case.source for row in rows if feels(name, row)})
        if name in FIXED:
            felt_text = constant.rows
        elif felt:
            felt_text = f"fitted on {len([1 for row in rows if feels(name, row)])} rows of {', '.join(felt)}"
        else:
            felt_text = "no row: presumed from its neighbours"
        lines += [
            f'["{name}"]',
            f"value = {values[name]:.6g}",
            f"low = {constant.low:.6g}",
            f"high = {constant.high:.6g}",
        ]
        lines += [f'unit = "{constant.unit}"', f'about = "{constant.about}"', f'rows = "{felt_text}"', ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def intervals(results: Sequence[RowResult], held_out: set[str]) -> dict[str, float]:
    """What 90 % of the rows held out lie within."""
    found = {}
    for name, errors in (
        ("interval.time", [abs(r.time_error or 0.0) for r in results if r.time_used and r.id in held_out]),
        ("interval.memory", [abs(r.memory_error or 0.0) for r in results if r.memory_used and r.id in held_out]),
    ):
        if errors:
            bound = constants()[name]
            found[name] = min(bound.high, max(bound.low, sorted(errors)[int(0.9 * (len(errors) - 1))]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="only write docs/accuracy.md, constants as they are")
    parser.add_argument("--leave-one-out", action="store_true", help="fit once more without each source")
    parser.add_argument("--only", choices=("time", "memory"), help="fit only the constants of one of them")
    parser.add_argument("--sweeps", type=int, default=8)
    parser.add_argument("--tries", type=int, default=400)
    arguments = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    every = evidence()
    rows = scored(every)
    chosen = fit_groups(rows)
    training = [row for row in rows if row.group in chosen]
    held_out = {row.case.id for row in rows} - {row.case.id for row in training}
    values = {name: c.value for name, c in constants().items()}
    if not arguments.report:
        kinds = (arguments.only,) if arguments.only else ("time", "memory")
        values = fitted(training, values, arguments.sweeps, arguments.tries, say, kinds, seeds=3)
        values |= intervals(validate(every, values).rows, held_out)
        write_constants(values, training)
    report = validate(every, values)
    left_out: dict[str, list[RowResult]] = {}
    if arguments.leave_one_out:
        for source in sorted({row.case.source for row in rows}):
            say(f"without {source}")
            others = [row for row in rows if row.case.source != source]
            without = fitted(others, values, 3, 40, say)
            mine = [row for row in every if source_of(row["id"]) == source]
            left_out[source] = list(validate(mine, without).rows)
    page = accuracy_page(report.rows, chosen, held_out, left_out, {row.case.id: row.case for row in rows})
    (ROOT / "docs" / "accuracy.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
