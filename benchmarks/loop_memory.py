"""The loop's half of memory and communication, which `python benchmarks/loop.py --memory` runs.

Eight processes on gloo take two steps of each job; the second is traced in every process. State, collectives (calls and
payload) and operations must be what was planned, byte for byte, and the first and the last rank must do what they do
without peers and data. The planned peak of each rank is laid beside the real one.

Plans are of NCCL's program. Gloo's reduce-scatter is an exchange and a sum: all parts arrive before they are added,
where NCCL receives the sum. What that holds at the peak is a column of its own, from the two programs without peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
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
hidden = 256
layers = 8
heads = 8
kv_heads = 4
head_dim = 32
ffn = 704
vocab = 2000
context = 256
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
    """real_bytes, planned_bytes: peaks of the rank in which they are farthest apart; gloo_bytes: by how much the peaks
    of the two programs differ at most; planned_off: as a share of the real peak, nccl_off: of that of NCCL's program;
    alone_off: the largest distance between a rank among its peers and alone; wrong: what is not equal and should be."""

    name: str
    real_bytes: int
    planned_bytes: int
    gloo_bytes: int
    planned_off: float
    nccl_off: float
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
            # Few sequences for many ranks: one in a microbatch.
            batch = replace(base.batch, micro_batch=1)
            found[layout_name(layout)] = replace(base, parallel=layout, batch=batch)
    return {name: job for name, job in found.items() if not check(job)}


def run_memory(part: str, say: Callable[[str], None]) -> list[Row]:
    """A row for each job whose name contains `part`."""
    jobs = {name: job for name, job in memory_jobs().items() if part in name}
    rows, begun = [], time.monotonic()
    with Pool(WORLD) as pool:
        for done, (name, job) in enumerate(jobs.items(), start=1):
            row = _row(name, job, pool)
            rows.append(row)
            left = (time.monotonic() - begun) / done * (len(jobs) - done)
            word = "equal" if not row.wrong else "DIFFERS"
            say(f"{done:>3} of {len(jobs)}  {name:<44} {word:<7} {row.planned_off:+6.1%}  {duration(left)} to go")
    return rows


def _row(name: str, job: Job, pool: Pool) -> Row:
    found = beside(job, pool, RANKS)
    planned = make_plan(job, program_software(job))
    nccl = [prove_rank(job, role, planned).peak.total for role in chosen(job, RANKS)]
    farthest = max((proof.peak.total for proof in found.real), key=lambda line: abs(_off(line)))
    return Row(
        name,
        farthest.traced,
        farthest.predicted,
        max(gloo.peak.total.traced - line.traced for gloo, line in zip(found.fake, nccl, strict=True)),
        _off(farthest),
        max(map(_off, nccl), key=abs),
        found.peak_off,
        (*found.unplanned(), *found.differences()),
    )


def _off(line: Line) -> float:
    return line.predicted / line.traced - 1


def memory_text(rows: list[Row]) -> str:
    header = ["job", "peak MiB", "planned", "off", "gloo's parts", "off NCCL's", "alone", "not equal"]
    lines = [
        [
            row.name,
            f"{row.real_bytes / 2**20:.2f}",
            f"{row.planned_bytes / 2**20:.2f}",
            f"{row.planned_off:+.1%}",
            f"{row.gloo_bytes / 2**20:.2f}" if row.gloo_bytes else "",
            f"{row.nccl_off:+.1%}",
            f"{row.alone_off:.2%}",
            "; ".join(row.wrong),
        ]
        for row in rows
    ]
    equal = sum(not row.wrong for row in rows)
    return (
        f"{table(header, lines)}\n\n{len(rows)} jobs on {WORLD} processes: bytes and calls equal in {equal};"
        f" largest distance between a rank among its peers and alone {max(row.alone_off for row in rows):.2%}\n"
        f"planned peak beside the real one: {_told([row.planned_off for row in rows])}\n"
        f"beside that of NCCL's program: {_told([row.nccl_off for row in rows])}"
    )


def _told(offs: list[float]) -> str:
    apart = sorted(map(abs, offs))
    within = sum(off <= NEAR for off in apart)
    return f"within {NEAR:.0%} in {within} of {len(apart)}, median {median(apart):.1%}, largest {apart[-1]:.1%}"


def memory_json(rows: list[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]
