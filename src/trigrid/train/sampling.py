"""Samples of a run's steps, for `trigrid compare`: where their time goes and what is held, on every rank.

A sample reads a clock (on CUDA an event) at both ends of each action, collective and wait, and takes two all-reduces
when the step is over. So only some steps are sampled, ever fewer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trigrid.data.workers import cores
from trigrid.engine.recorder import COMPUTE, WAIT, Held, Recorder, Span
from trigrid.engine.runtime import Engine
from trigrid.job import dump_job
from trigrid.ledger import STATE
from trigrid.report.console import Console
from trigrid.report.host import allocated_bytes, peak_resident_bytes
from trigrid.report.lines import LineFile
from trigrid.report.samples import NAME, PARTS, PEAKS, Slowest, planned_counts

RARER, LONGEST = 4, 1000
"""After step n of a life the next sample is n ÷ RARER steps later, at least 1 and at most LONGEST."""
NAMED = 4
"""Differences from the plan that one rank names."""
Numbers = dict[str, int]


class Sampler:
    """Decides which steps are sampled, and what of them rank 0 writes to the run's folder. Every rank must call it
    alike.

    done: steps that the run had before; device: its name; local_world: ranks of this node; before_bytes: what was
    resident in this process before the engine was built.
    """

    def __init__(
        self, engine: Engine, run_dir: Path, done: int, device: str, local_world: int, before_bytes: int
    ) -> None:
        self._engine, self._before_bytes = engine, before_bytes
        comm, self._cuda = engine.comm, engine.device.type == "cuda"
        self._lines = None if comm.rank else LineFile(run_dir / NAME, Console(quiet=True).warn)
        self._held = partial(torch.cuda.memory_allocated, engine.device) if self._cuda else allocated_bytes
        self._steps, self._next, self._told = 0, 2, False
        self._begun_bytes = 0
        self._before: Numbers = {}
        self._planned: Numbers = {}
        if self._lines:
            share = None if self._cuda else cores() / local_world
            self._lines.write("start", step=done, device=device, cores=share, job=dump_job(engine.job))

    def begin(self, may: bool) -> bool:
        """Before a step: whether it is sampled, where it `may` be."""
        self._steps += 1
        if self._steps < self._next or not may:
            return False
        self._next = self._steps + min(LONGEST, max(1, self._steps // RARER))
        self._begun_bytes, self._before = self._held(), self._traffic()
        self._engine.comm.recorder = Recorder(self._engine.device, self._held if self._begun_bytes else None)
        return True

    def end(self, step: int, data_wait_s: float, updated: bool) -> None:
        """After a step that is sampled; it counts where it `updated` the weights."""
        comm = self._engine.comm
        recorder, comm.recorder = comm.recorder, None
        assert recorder is not None
        if not updated:
            return
        step_s = recorder.elapsed_s()
        counted = self._counted()
        self._planned = self._planned or planned_counts(self._engine.job, comm.rank)
        unlike = [
            f"rank {comm.rank}: {name} {counted.get(name, 0):,}, planned {self._planned.get(name, 0):,}"
            for name in sorted(self._planned.keys() | counted.keys())
            if counted.get(name, 0) != self._planned.get(name, 0)
        ]
        spans = recorder.spans()
        parts = parts_of(spans, step_s, data_wait_s)
        slowest, unlike_ranks, means, longest_s, peaks = self._gathered(
            parts, bool(unlike), step_s, self._peaks(self._kept(spans, recorder.held()))
        )
        if unlike_ranks or not self._told:
            self._told = True
            first = (comm.coord.dp, comm.coord.cp, comm.coord.tp) == (0, 0, 0)
            mine = (comm.coord.pp, comm.rank, counted if first else None, unlike[:NAMED])
            self._write_counted(comm.gather_objects(mine), unlike_ranks)
        if self._lines:
            who = slowest._asdict() if slowest else None
            self._lines.write("sample", step=step, step_s=longest_s, parts_s=means, peaks=peaks, slowest=who)

    def _write_counted(self, found: list[object], unlike_ranks: int) -> None:
        if not self._lines:
            return
        told: list[tuple[int, int, Numbers | None, list[str]]] = found  # type: ignore[assignment]
        stages = [
            {"rank": rank, "counted": counted} for _, rank, counted, _ in sorted(told, key=lambda t: t[0]) if counted
        ]
        unlike = [line for *_, lines in told for line in lines][: 2 * NAMED]
        self._lines.write("counted", stages=stages, unlike=unlike, unlike_ranks=unlike_ranks)

    def _traffic(self) -> Numbers:
        """Calls and payload bytes so far."""
        traffic = self._engine.comm.traffic
        return {
            f"{axis} {kind} {what}": n
            for what, counts in (("calls", traffic.calls), ("bytes", traffic.payload_bytes))
            for (axis, kind), n in counts.items()
        }

    def _counted(self) -> Numbers:
        """State now, and traffic since the step began, of this rank."""
        held = self._engine.live_bytes()
        moved = {name: n - self._before.get(name, 0) for name, n in self._traffic().items()}
        return {name: held[name] for name in STATE} | {name: n for name, n in moved.items() if n}

    def _kept(self, spans: Sequence[Span], held: Sequence[Held]) -> int:
        """The most that was held between two actions, beyond what was at the step's begin."""
        computed = (span for span in spans if span.stream == COMPUTE)
        after = [now.bytes for span, now in zip(computed, held, strict=False) if span.stage is not None]
        return max(0, max(after, default=0) - self._begun_bytes)

    def _peaks(self, kept: int) -> Numbers:
        device = self._engine.device
        found = dict.fromkeys(PEAKS, 0) | {"kept": kept}
        if self._cuda:
            free, whole = torch.cuda.mem_get_info(device)
            allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            return found | {"allocated": allocated, "reserved": reserved, "device": whole - free}
        resident = peak_resident_bytes()
        grown = resident - self._before_bytes if self._before_bytes else 0
        return found | {"resident": resident, "grown": max(0, grown)}

    def _gathered(
        self, parts: dict[str, float], unlike: bool, step_s: float, peaks: Numbers
    ) -> tuple[Slowest | None, int, list[dict[str, float]], float, list[Numbers]]:
        """Of all ranks: who is slowest, how many are unlike their plan, means of the parts by stage, the longest step,
        the largest peaks by stage."""
        comm, device = self._engine.comm, self._engine.device
        world, stage, stages = comm.grid.world, comm.coord.pp, comm.grid.layout.pp
        width = len(PARTS)
        sums = torch.zeros(stages * width + world + 1, dtype=torch.float64)
        sums[stage * width : (stage + 1) * width] = _numbers(parts[name] for name in PARTS)
        sums[stages * width + comm.rank] = sum(parts[name] for name in ("compute", "optimizer", "other"))
        sums[-1] = float(unlike)
        most = torch.zeros(stages * len(PEAKS) + 1, dtype=torch.float64)
        most[stage * len(PEAKS) : (stage + 1) * len(PEAKS)] = _numbers(peaks[name] for name in PEAKS)
        most[-1] = step_s
        total = comm.read(comm.all_reduce(sums.to(device), "world"))
        largest = comm.read(comm.all_reduce(most.to(device), "world", "max"))
        alike = world // stages
        means = [{name: total[s * width + i] / alike for i, name in enumerate(PARTS)} for s in range(stages)]
        found = [{name: int(largest[s * len(PEAKS) + i]) for i, name in enumerate(PEAKS)} for s in range(stages)]
        busy_s = total[stages * width : -1]
        return slowest_of(busy_s, comm.grid.stages), int(total[-1]), means, largest[-1], found


def _numbers(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def parts_of(spans: Sequence[Span], step_s: float, data_wait_s: float) -> dict[str, float]:
    """The seconds of a step by part, which sum to `step_s`: actions and the update without what they wait for, waits by
    their axis and by what runs meanwhile, and the rest."""
    busy = sorted((span for span in spans if span.stream == COMPUTE), key=lambda span: span.start_s)
    starts = [span.start_s for span in busy]
    parts = dict.fromkeys(PARTS, 0.0)
    for span in busy:
        parts[_work(span)] += span.stop_s - span.start_s
    for wait in (span for span in spans if span.stream == WAIT):
        place = bisect_right(starts, wait.start_s) - 1
        within = busy[place] if place >= 0 and wait.start_s < busy[place].stop_s else None
        seconds = wait.stop_s - wait.start_s
        parts[_waiting(wait.kind, within)] += seconds
        if within:
            parts[_work(within)] -= seconds
    # A device may still have been at the step before while the host waited.
    parts["data"] = min(data_wait_s, max(0.0, step_s - sum(parts.values())))
    parts["other"] = step_s - sum(parts.values())
    return parts


def _work(span: Span) -> str:
    return "optimizer" if span.stage is None else "compute"


def _waiting(axis: str, within: Span | None) -> str:
    """The part that a wait on `axis` belongs to."""
    if axis in ("zero", "replicate"):
        kind = within.kind if within else ""
        return {"sum gradients": "reduce", "update": "gather"}.get(kind, "zero")
    return {"pp": "pipeline", "kv": "tp", "batch": "others", "world": "others"}.get(axis, axis)


def slowest_of(busy_s: Sequence[float], stages: Sequence[int]) -> Slowest | None:
    """The rank that works longest beside the mean of the others of its stage; None where every rank is the only one."""
    totals, counts = defaultdict[int, float](float), Counter(stages)
    for mine, stage in zip(busy_s, stages, strict=True):
        totals[stage] += mine
    found = [
        Slowest(rank, mine, (totals[stage] - mine) / (counts[stage] - 1))
        for rank, (mine, stage) in enumerate(zip(busy_s, stages, strict=True))
        if counts[stage] > 1 and totals[stage] > mine
    ]
    return max(found, key=lambda one: one.busy_s / one.peers_s, default=None)
