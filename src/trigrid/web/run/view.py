"""What the page asks of a run: what it is, how it goes, where its time and memory went, beside what was planned."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from trigrid.errors import Problem, Refused
from trigrid.job import load_job
from trigrid.plan.plan import as_json, make_plan
from trigrid.plan.simulate import simulate
from trigrid.report.compare import Figure, compare_run
from trigrid.report.goodput import CAUSES, ENDED, FAILED, OPEN, STOPPED, account
from trigrid.report.goodput_text import account_json, advice, prospect_json
from trigrid.report.measured import read_run
from trigrid.report.plan import short_text
from trigrid.report.prospect import Known, prospect_of
from trigrid.report.samples import NAME as SAMPLES
from trigrid.report.samples import PARTS
from trigrid.report.timelines import compare, comparison_json, explained
from trigrid.report.units import figures
from trigrid.schedule.recorded import NAME as TRACE
from trigrid.web.run.folder import JOB, check_folder, file_in
from trigrid.web.run.following import COLUMNS, Following
from trigrid.web.run.lanes import lanes, measured_lanes, recorded_memory, straggling
from trigrid.web.run.words import told

MOST_ROWS = 2000
"""Steps told at once; of more every n-th, and the last."""
MOST_EVENTS = 200
FACTOR = 3
"""From here on a difference is told as a factor."""
QUIET_S, QUIET_STEPS = 60.0, 20
"""A run whose last line is older, in seconds and in steps, may have been killed."""
CURSOR = re.compile(r"([0-9a-f]{8})-(\d{1,12})")
GOING = "under way"
ENDS = {"end": ENDED, "preempted": STOPPED, "failed": FAILED}


class RunView:
    """The run in `run_dir`. Its methods give what JSON can hold, and may be called from several threads."""

    def __init__(self, run_dir: Path) -> None:
        """Raises Refused where `run_dir` is no folder of a run."""
        self._folder = check_folder(run_dir)
        self._job = load_job(self._folder / JOB, env={})
        self._plan = make_plan(self._job)
        self._following, self._lock = Following(self._folder), Lock()
        self._token = secrets.token_hex(4)
        self._kept: dict[str, tuple[int, dict[str, Any]]] = {}

    @property
    def name(self) -> str:
        return self._folder.name

    def facts(self) -> dict[str, Any]:
        """What the run is, and its plan."""
        job = self._job
        return {
            "name": self.name,
            "steps": job.run.steps,
            "world": job.parallel.world,
            "microbatches": job.batch.microbatches(job.parallel),
            "gpu": job.cluster.gpu,
            "words": short_text(self._plan).splitlines(),
            "plan": as_json(self._plan),
        }

    def progress(self, since: str = "") -> dict[str, Any]:
        """How the run goes: rows of the steps that were recorded after the answer whose `cursor` is `since`, to take
        the place of all from the first of them on; all that there are, and `fresh`, where `since` is of no answer that
        still counts."""
        with self._lock:
            follow = self._following
            follow.read()
            match = CURSOR.fullmatch(since)
            known = int(match[2]) if match and match[1] == self._token else -1
            fresh = not follow.begin <= known <= follow.lines
            line = -1 if fresh else known
            rows, every = _thinned(follow.steps.since(line))
            last = dict(zip(COLUMNS, follow.steps.rows[-1], strict=True)) if follow.steps.rows else None
            age_s = _age_s(follow)
            return {
                "cursor": f"{self._token}-{follow.lines}",
                "fresh": fresh,
                "columns": list(COLUMNS),
                "rows": rows,
                "every": every,
                "validation": follow.validation.since(line),
                "last": last,
                "facts": follow.facts,
                "state": _state(follow, age_s, last["step_s"] if last else None),
                "age_s": age_s,
                "slow": [{"rank": rank, **asdict(slow)} for rank, slow in sorted(follow.slow.items())],
                "events": [words for event in follow.events[-MOST_EVENTS:] if (words := told(event))],
            }

    def goodput(self) -> dict[str, Any]:
        """Where the time went, by cause, and what is to be expected; "account" is None before the first event."""
        return self._once("goodput", self._lines(), self._accounted)

    def compare(self) -> dict[str, Any]:
        """Memory and time of its pipeline stages by category, planned and measured."""
        return self._once("compare", self._lines(), self._compared)

    def timeline(self) -> dict[str, Any]:
        """The step that was recorded beside the planned one; "problems" instead where there is none to compare."""
        trace = file_in(self._folder, TRACE)
        if trace is None:
            reason = "no step was recorded: `trigrid train JOB --trace STEP` records one"
            return {"problems": [_problem(Problem("run", self.name, reason))]}
        return self._once("timeline", trace.stat().st_mtime_ns, lambda: self._played(trace))

    def _lines(self) -> int:
        """That the run has written, and the newest of them taken in."""
        with self._lock:
            self._following.read()
            return self._following.lines

    def _once(self, name: str, version: int, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` gives, made again only for another version."""
        with self._lock:
            if name not in self._kept or self._kept[name][0] != version:
                self._kept[name] = version, make()
            return self._kept[name][1]

    def _accounted(self) -> dict[str, Any]:
        follow, told = self._following, None
        if follow.events:
            found = account(follow.events, follow.metrics, time.time())
            prospect = prospect_of(self._job, Known(), found)
            expected = {"expected": prospect_json(prospect), "advice": advice(prospect)}
            told = account_json(found, self._job.run.steps) | expected
        return {"causes": dict(CAUSES), "account": told}

    def _compared(self) -> dict[str, Any]:
        file_in(self._folder, SAMPLES)
        found = compare_run(read_run(self._folder, time.time()))
        return {
            "samples": len(found.run.samples),
            "same_machine": found.same_machine,
            "device": found.run.device,
            "explained": dict(PARTS),
            "parts": [[_figure(figure) for figure in stage] for stage in found.parts],
            "busiest": found.busiest,
            "memory": [
                {"stage": held.stage, "margin": held.margin, "figures": [_figure(figure) for figure in held.figures]}
                for held in found.memory
            ],
            "slowest": found.slowest._asdict() if found.slowest else None,
        }

    def _played(self, trace: Path) -> dict[str, Any]:
        ceiling = self._plan.ceiling_bytes
        try:
            planned = simulate(self._job)
            comparison = compare(planned, trace)
        except Refused as refused:
            return {"problems": [_problem(problem) for problem in refused.problems]}
        held = [
            [(0.0, state), *((t, state + size) for t, size in memory)]
            for state, memory in zip(planned.stages.state_bytes, planned.memory, strict=True)
        ]
        return {
            "words": explained(comparison),
            "figures": comparison_json(comparison),
            "planned": lanes(planned.timeline, held, ceiling),
            "measured": measured_lanes(comparison, recorded_memory(trace), ceiling),
            "ranks": straggling(comparison.recorded),
        }


def _thinned(rows: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], int]:
    """At most about MOST_ROWS of `rows`, the last among them, and of how many each is one."""
    every = max(1, -(-len(rows) // MOST_ROWS))
    return [*rows[:-1:every], *rows[-1:]], every


def _state(follow: Following, age_s: float | None, step_s: float | None) -> str:
    """How a run stands by its last word; one that says nothing for long may have been killed."""
    kinds = (event["kind"] for event in reversed(follow.events) if event["kind"] in {*ENDS, "launch", "start"})
    state = ENDS.get(next(kinds, ""), OPEN)
    heard = age_s is not None and age_s < max(QUIET_S, QUIET_STEPS * (step_s or 0.0))
    return GOING if state == OPEN and heard else state


def _age_s(follow: Following) -> float | None:
    """Seconds since the last line of either file."""
    times = [lines[-1].get("time_s") for lines in (follow.events, follow.metrics) if lines]
    known = [time_s for time_s in times if isinstance(time_s, int | float)]
    return max(0.0, time.time() - max(known)) if known else None


def _figure(figure: Figure) -> dict[str, Any]:
    return {"name": figure.name, "planned": figure.planned, "measured": figure.measured, "gap": _gap(figure)}


def _gap(figure: Figure) -> str:
    """What was measured against what was planned, in words; "" where one of them is not known."""
    if figure.gap is None or not figure.planned or figure.measured is None:
        return ""
    if figure.gap == 0:
        return "equal"
    ratio = figure.measured / figure.planned
    return f"{figures(ratio)} ×" if ratio > FACTOR else f"{ratio - 1:+.1%}"


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "key": problem.key,
        "value": str(problem.value),
        "reason": problem.reason,
        "nearest": list(map(str, problem.legal)),
    }
