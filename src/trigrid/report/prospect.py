"""What a job has to expect of its failures: with the checkpoint interval it has, and with the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from trigrid.plan.goodput import DETECT_S, MTBF_GPU_S, RESTART_S, LongRun, best_interval_s, expected
from trigrid.plan.long_run import CheckpointCost, NODE_WRITE_Bps, checkpoint_cost
from trigrid.plan.plan import make_plan
from trigrid.report.goodput import Account
from trigrid.spec.job import Job


@dataclass(frozen=True)
class Prospect:
    """best: with the best interval, best_steps; used: with checkpoint.every, `every` steps, None where that is 0.

    cost: of a checkpoint, by the planner. sources: where each figure is from, by the name of its field in `LongRun`,
    and that of step_s.
    """

    gpus: int
    step_s: float
    every: int
    best_steps: int
    best: LongRun
    used: LongRun | None
    cost: CheckpointCost
    steps: int
    sources: Mapping[str, str]

    @property
    def gain(self) -> float:
        """Share of the time that the best interval wins over the one in use."""
        used = expected(self.used)["productive"] if self.used else 0.0
        return expected(self.best)["productive"] - used


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a person knows of a cluster and gives; None: presumed, where no run has measured it. mtbf_s: between
    failures of the whole job; restart_s, detect_s: as in `LongRun`; node_write_Bps: into shared storage."""

    mtbf_s: float | None = None
    restart_s: float | None = None
    detect_s: float | None = None
    node_write_Bps: float | None = None


def prospect_of(job: Job, known: Known, measured: Account | None = None) -> Prospect:
    """What `job` has to expect: by what is known, else by what a run of it has measured, else by the planner."""
    plan = make_plan(job)
    gpus = plan.setup.world
    cost = checkpoint_cost(plan, known.node_write_Bps or NODE_WRITE_Bps)
    written = None if known.node_write_Bps is None else cost.write_s
    choices: dict[str, tuple[float | None, float | None, float, str]] = {
        "mtbf_s": (known.mtbf_s, None, MTBF_GPU_S / gpus, "Llama 3's rate"),
        "step_s": (None, measured.median_step_s if measured else None, plan.step_s.best, "planned"),
        "stall_s": (None, measured.stall_s if measured else None, cost.stall_s, "presumed"),
        "write_s": (written, measured.write_s if measured else None, cost.write_s, "planned"),
        "detect_s": (known.detect_s, measured.detect_s if measured else None, DETECT_S, "presumed"),
        "restart_s": (known.restart_s, measured.restart_s if measured else None, RESTART_S - DETECT_S, "presumed"),
    }
    found, sources = dict[str, float](), dict[str, str]()
    for name, (given, seen, planned, source) in choices.items():
        told = ((given, "as given"), (seen, "measured"), (planned, source))
        found[name], sources[name] = next((value, said) for value, said in told if value is not None)
    step_s, every = found.pop("step_s"), job.checkpoint.every
    best_s = best_interval_s(found["mtbf_s"], found["stall_s"], found["write_s"])
    steps = max(1, ceil(found["write_s"] / step_s), round(best_s / step_s))
    best = LongRun(interval_s=steps * step_s, **found)
    # A checkpoint waits for the one before it.
    used = replace(best, interval_s=max(every * step_s, best.write_s)) if every else None
    return Prospect(gpus, step_s, every, steps, best, used, cost, job.run.steps, sources)
