"""The loop's half of memory and communication, which `python benchmarks/loop.py --memory` runs.

Eight processes on gloo take two steps of each job; the second is traced in every process. State, collectives (calls and
payload) and operations must be what was planned, byte for byte, and the first and the last rank must do what they do
without peers and data. The planned peak of each rank is laid beside the real one.

Jobs run on CPUs here, and are planned so: gloo's reduce-scatter is an exchange and a sum, for which all parts arrive
before they are added. `on GPUs` is the distance of the same job's plan for GPUs from NCCL's program, of the two ranks
without peers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from trigrid.check.beside import beside
from trigrid.check.matrix import layout_name
from trigrid.check.parity import layouts
from trigrid.check.pool import Pool
from trigrid.check.prove import Line, program_software, prove_rank
from trigrid.check.roles import chosen
from trigrid.job import job_from_text
from trigrid.plan.plan import make_plan
from trigrid.report.console import duration, table
from trigrid.spec.job import Job
from trigrid.spec.layout import V_SHAPED
from trigrid.spec.rules import check

WORLD = 8
RANKS = (0, WORLD - 1)
BASE = """\
[model]
name = "loop"
hidden = 128
layers = 4
heads = 8
kv_heads = 4
head_dim = 16
ffn = 352
vocab = 1000
context = 128
[batch]
sequence = 128
global_batch = 16
micro_batch = 2
[parallel]
tp = 2
pp = 2
dp = 2
[run]
steps = 1
precision = "bf16"
"""
NEAR = 0.05
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev")


@dataclass(frozen=True)
class Row:
    """zero, schedule, recompute: of the job; real_bytes, planned_bytes: peaks of the rank in which they are farthest
    apart; planned_off: as a share of the real peak; gpu_off: the same on GPUs; alone_off: the largest distance between
    a rank among its peers and alone; wrong: what is not equal and should be."""

    name: str
    zero: int
    schedule: str
    recompute: str
    real_bytes: int
    planned_bytes: int
    planned_off: float
    gpu_off: float
    alone_off: float
    wrong: tuple[str, ...]


def memory_jobs() -> dict[str, Job]:
    """TP 2 × PP 2 × DP 2 under every ZeRO stage, recomputation and schedule, with and without sequence parallelism; and
    every other layout of eight processes under every ZeRO stage."""
    base, found = job_from_text(BASE), {}
    for zero, recompute, schedule, sp in product(range(4), RECOMPUTE, SCHEDULES, (True, False)):
        stages = 2 if schedule == "interleaved" or schedule in V_SHAPED else 1
        layout = replace(
            base.parallel,
            zero=zero,
            recompute=recompute,
            schedule=schedule,
            virtual_stages=stages,
            sequence_parallel=sp,
        )
        words = [layout_name(layout), schedule, recompute, *(["sp"] if sp else [])]
        found[" ".join(words)] = replace(base, parallel=layout)
    for layout in layouts([WORLD], base.parallel):
        if (layout.tp, layout.pp) != (2, 2):
            # Few sequences for many ranks: one in a microbatch; and a layer for each of eight stages.
            batch, model = replace(base.batch, micro_batch=1), replace(base.model, layers=WORLD)
            found[layout_name(layout)] = replace(base, parallel=layout, batch=batch, model=model)
    return {name: job for name, job in found.items() if not check(job)}


def run_memory(part: str, share: tuple[int, int], kept: Path | None, say: Callable[[str], None]) -> list[Row]:
    """A row for each job that has all words of `part` in its name, of them share (k, n) the k-th of every n.

    kept: a file to which each row goes as it comes, and whose rows are not run again; then all of its rows are
    returned.
    """
    every = [name for name in memory_jobs() if set(part.split()) <= set(name.split())][share[0] - 1 :: share[1]]
    rows = {row.name: row for row in _read(kept)}
    todo = {name: job for name, job in memory_jobs().items() if name in every and name not in rows}
    begun = time.monotonic()
    with Pool(WORLD) as pool:
        for done, (name, job) in enumerate(todo.items(), start=1):
            row = rows[name] = _row(name, job, pool)
            if kept:
                with kept.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(row)) + "\n")
            left = (time.monotonic() - begun) / done * (len(todo) - done)
            word = "equal" if not row.wrong else "DIFFERS"
            say(f"{done:>3} of {len(todo)}  {name:<44} {word:<7} {row.planned_off:+7.2%}  {duration(left)} to go")
    return list(rows.values())


def _read(kept: Path | None) -> list[Row]:
    if kept is None or not kept.exists():
        return []
    lines = map(json.loads, kept.read_text(encoding="utf-8").splitlines())
    return [Row(**{**line, "wrong": tuple(line["wrong"])}) for line in lines]


def _row(name: str, job: Job, pool: Pool) -> Row:
    found = beside(job, pool, RANKS)
    planned = make_plan(job, program_software(job))
    on_gpus = [prove_rank(job, role, planned).peak.total for role in chosen(job, RANKS)]
    farthest = max((proof.peak.total for proof in found.real), key=lambda line: abs(_off(line)))
    return Row(
        name,
        job.parallel.zero,
        job.parallel.schedule,
        str(job.parallel.recompute),
        farthest.traced,
        farthest.predicted,
        _off(farthest),
        max(map(_off, on_gpus), key=abs),
        found.peak_off,
        (*found.unplanned(), *found.differences()),
    )


def _off(line: Line) -> float:
    return line.predicted / line.traced - 1


def memory_text(rows: list[Row]) -> str:
    """A line for each job; then what they have in common by ZeRO stage, schedule and recomputation; then all."""
    header = ["job", "peak MiB", "planned", "off", "on GPUs", "alone", "not equal"]
    lines = [
        [
            row.name,
            f"{row.real_bytes / 2**20:.2f}",
            f"{row.planned_bytes / 2**20:.2f}",
            f"{row.planned_off:+.2%}",
            f"{row.gpu_off:+.2%}",
            f"{row.alone_off:.2%}",
            "; ".join(row.wrong),
        ]
        for row in rows
    ]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for word in (f"ZeRO-{row.zero}", row.schedule, f"recompute {row.recompute}"):
            groups.setdefault(word, []).append(row)
    order = [*(f"ZeRO-{zero}" for zero in range(4)), *SCHEDULES, *(f"recompute {word}" for word in RECOMPUTE)]
    told = [_summary(word, groups[word]) for word in order if word in groups]
    summary = table(["", "jobs", "equal", f"within {NEAR:.0%}", "median", "farthest"], [*told, _summary("all", rows)])
    alone, on_gpus = (max((abs(getattr(row, name)) for row in rows), default=0.0) for name in ("alone_off", "gpu_off"))
    return (
        f"{table(header, lines)}\n\n{summary}\n\nequal: state, collectives and operations, byte for byte. Largest"
        f" distance between a rank among its peers and alone {alone:.2%}, of the plan for GPUs from NCCL's program"
        f" {on_gpus:.2%}."
    )


def _summary(word: str, rows: Iterable[Row]) -> list[str]:
    mine = list(rows)
    apart = [abs(row.planned_off) for row in mine]
    within = sum(off <= NEAR for off in apart)
    equal = sum(not row.wrong for row in mine)
    far = max((row.planned_off for row in mine), key=abs, default=0.0)
    share = f"{within} ({within / max(1, len(mine)):.0%})"
    return [word, str(len(mine)), str(equal), share, f"{median(apart or [0.0]):.2%}", f"{far:+.2%}"]


def memory_json(rows: list[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]
