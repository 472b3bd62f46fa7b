"""What ZeRO and recomputation cost a rank of Llama-3 405B on 16,384 GPUs, in memory and in traffic.

    python benchmarks/zero.py [--json]

The real program of one rank of a middle stage (TP 8 × PP 16 × DP 128, as in examples/llama3-405b.toml) runs two steps
without its peers and without data, under every ZeRO stage with every recomputation; the second step is counted. Memory
is that of live storages: the peak, and what stays between steps. Traffic is what the rank's collectives and messages
carry in a step, an all-reduce counted twice. About 2 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from trigrid.check.prove import Proof, prove
from trigrid.check.roles import chosen
from trigrid.job import load_job
from trigrid.spec.job import Job
from trigrid.spec.layout import RecomputeName, ZeroStage

JOB = Path(__file__).parents[1] / "examples" / "llama3-405b.toml"
MIDDLE = 8
"""The pipeline rank that is shown: neither embedding nor head is on it."""
AXES = {"tp": ("tp",), "pp": ("pp",), "dp": ("zero", "replicate", "batch")}
GIB = 2**30


def cell(job: Job, zero: ZeroStage, recompute: RecomputeName) -> tuple[Job, Proof]:
    layout = replace(job.parallel, zero=zero, recompute=recompute)
    job = replace(job, parallel=layout)
    rank = next(r for r in range(layout.world) if r // layout.tp % layout.pp == MIDDLE)
    (proof,) = prove(job, chosen(job, (rank,)))
    return job, proof


def figures(proof: Proof) -> dict[str, float]:
    """Bytes of memory and of traffic by axis, and whether the plan agrees."""
    moved = dict.fromkeys(AXES, 0)
    for line in proof.payload:
        axis, kind = line.name.split(" ", 1)
        for name, axes in AXES.items():
            if axis in axes:
                moved[name] += line.traced * (2 if kind == "all_reduce" else 1)
    return {
        "peak_bytes": proof.peak.total.traced,
        "planned_peak_bytes": proof.peak.total.predicted,
        "state_bytes": sum(line.traced for line in proof.state),
        **{f"{name}_bytes": moved[name] for name in AXES},
        "flops": sum(line.traced for line in proof.flops),
        "holds": proof.holds,
        "cpu_s": proof.cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the figures in bytes, on stdout")
    asked = parser.parse_args()
    job = load_job(JOB, (), env={})
    rows = {}
    for zero, recompute in product(get_args(ZeroStage), get_args(RecomputeName)):
        rows[zero, recompute] = figures(cell(job, zero, recompute)[1])
        print(f"ZeRO-{zero}, recompute {recompute}: {rows[zero, recompute]['cpu_s']:.0f} CPU-s", file=sys.stderr)
    if asked.json:
        print(json.dumps([{"zero": zero, "recompute": recompute, **row} for (zero, recompute), row in rows.items()]))
        return
    table = Table(box=None)
    for name in ("ZeRO", "recompute", "peak GiB", "plan ÷ trace", "state GiB", "TP GiB", "PP GiB", "DP GiB", "PFLOP"):
        table.add_column(name, justify="left" if name == "recompute" else "right")
    for (zero, recompute), row in rows.items():
        memory = (f"{row['peak_bytes'] / GIB:.1f}", f"{row['planned_peak_bytes'] / row['peak_bytes']:.3f}")
        moved = (f"{row[f'{name}_bytes'] / GIB:.1f}" for name in AXES)
        state, flops = f"{row['state_bytes'] / GIB:.1f}", f"{row['flops'] / 1e15:.1f}"
        table.add_row(str(zero), recompute, *memory, state, *moved, flops)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
