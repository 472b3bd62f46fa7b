"""Folders of runs as `trigrid train` leaves them, with figures that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trigrid.job import dump_job
from trigrid.plan.plan import make_plan
from trigrid.report.compare import planned_parts
from trigrid.report.samples import PARTS, PEAKS, planned_counts
from trigrid.spec.job import Job

PRODUCTS_Fps = 4e9


class Folder:
    """A run in `path`, whose clock goes on with each line."""

    def __init__(self, path: Path, job: Job, device: str = "NVIDIA H100 80GB HBM3", cores: float | None = None):
        self.path, self.job, self.device, self.cores = path, job, device, cores
        self.clock, self.step = 1e9, 0
        path.mkdir(parents=True, exist_ok=True)
        (path / "job.toml").write_text(dump_job(job))

    def tell(self, name: str, kind: str, after_s: float = 0.0, **values: Any) -> None:
        self.clock += after_s
        line = json.dumps({"kind": kind, "time_s": self.clock, **values})
        with (self.path / f"{name}.jsonl").open("a") as file:
            file.write(f"{line}\n")

    def start(self, job: Job | None = None, done: int = 0) -> None:
        self.job, self.step = job or self.job, done
        world = self.job.parallel.world
        self.tell("events", "launch", 1.0, world=world, restart=0)
        self.tell("events", "start", 1.0, step=done, resumed=done > 0, checkpoint=None, world=world)
        self.tell("samples", "start", step=done, device=self.device, cores=self.cores, job=dump_job(self.job))
        self.tell("metrics", "start", device=self.device, world=world, matmul_flops_per_s=PRODUCTS_Fps)

    def trained(self, *steps_s: float) -> None:
        for step_s in steps_s:
            self.step += 1
            self.tell("metrics", "step", step_s, step=self.step, step_s=step_s, loss=1.0)

    def sampled(
        self,
        more_s: Mapping[str, float] | None = None,
        *,
        rates: float = 1.0,
        by_stage: Mapping[int, Mapping[str, float]] | None = None,
        peaks: Mapping[str, int] | None = None,
        slowest: tuple[int, float, float] | None = None,
    ) -> None:
        """A sample of the step that was trained last: the planned parts times `rates`, and `more_s` besides."""
        plan, parts = make_plan(self.job), []
        for stage in range(self.job.parallel.pp):
            planned = {name: rates * s for name, s in planned_parts(plan, stage).items()}
            added = {**(more_s or {}), **((by_stage or {}).get(stage, {}))}
            parts.append({name: planned[name] + added.get(name, 0.0) for name in PARTS})
        held = [dict.fromkeys(PEAKS, 0) | dict(peaks or {}) for _ in parts]
        who = dict(zip(("rank", "busy_s", "peers_s"), slowest, strict=True)) if slowest else None
        longest_s = max(sum(stage.values()) for stage in parts)
        told = {"step": self.step, "step_s": longest_s, "parts_s": parts, "peaks": held, "slowest": who}
        self.tell("samples", "sample", **told)

    def counted(self, unlike: tuple[str, ...] = (), unlike_ranks: int = 0, **changed: int) -> None:
        """State and traffic as planned, but for `changed` on the first stage."""
        tp = self.job.parallel.tp
        stages = [
            {"rank": stage * tp, "counted": planned_counts(self.job, stage * tp)}
            for stage in range(self.job.parallel.pp)
        ]
        stages[0]["counted"].update(changed)  # type: ignore[attr-defined]
        self.tell("samples", "counted", stages=stages, unlike=list(unlike), unlike_ranks=unlike_ranks)
