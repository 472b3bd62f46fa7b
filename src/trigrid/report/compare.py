"""A run beside its plan: what was planned, what the program does on a dry run, what was measured, by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from trigrid.errors import Refused
from trigrid.grid import grid_of
from trigrid.ledger import STATE
from trigrid.plan.measured_file import load_measured
from trigrid.plan.memory import DEVICE_ONLY, StageMemory
from trigrid.plan.plan import Plan, make_plan, number_format, step_for
from trigrid.plan.state import rank_state
from trigrid.report.measured import Run
from trigrid.report.samples import PARTS, PEAKS, Counted, Sample, Slowest, planned_counts
from trigrid.spec.job import Job

GPU_ONLY = ("workspace", "allocator", *DEVICE_ONLY)
"""Planned memory that a process on a CPU does not have."""
MOVING = ("activations", "logits", "messages", "transients")
FEWEST = 1024
"""Bytes of a category that is shown."""
SLOW = 1.2
"""A rank is late that works so many times as long as the others of its stage."""


@dataclass(frozen=True)
class Traced:
    """What a dry run of one rank has shown, in bytes. stages: pipeline ranks that are alike; peak: by category at its
    fullest moment; kept: most that is held between two actions beyond state and inputs."""

    stages: tuple[int, ...]
    state: Mapping[str, int]
    peak: Mapping[str, int]
    peak_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class Figure:
    """One quantity three ways, None where it is not known. unit: of all three; exact: whether they are to be equal."""

    name: str
    planned: float | None
    traced: float | None
    measured: float | None
    exact: bool = False

    @property
    def gap(self) -> float | None:
        """Measured less planned."""
        return None if self.measured is None or self.planned is None else self.measured - self.planned


@dataclass(frozen=True)
class Memory:
    """Bytes on the ranks of one pipeline stage. margin: what the plan says it may be wrong by."""

    stage: int
    figures: tuple[Figure, ...]
    margin: int | None

    def __getitem__(self, name: str) -> Figure:
        """The figure called so, without a value where nothing is known of it."""
        return next((figure for figure in self.figures if figure.name == name), Figure(name, None, None, None))


@dataclass(frozen=True)
class Comparison:
    """plan: None where there is none, for the reason `unplanned`. same_machine: whether the plan is for the device that
    the run was on, as far as that is known. parts: seconds of a step on the ranks of each pipeline stage; busiest: the
    one of them that works longest; slowest: rank, where it is the same in most samples; traffic: calls and payload
    bytes of a step on the first rank of each stage, by axis and kind."""

    run: Run
    plan: Plan | None
    unplanned: str
    same_machine: bool
    parts: tuple[tuple[Figure, ...], ...]
    busiest: int
    slowest: Slowest | None
    memory: tuple[Memory, ...]
    traffic: tuple[tuple[Figure, ...], ...]

    @property
    def fullest(self) -> Memory:
        """The stage that is planned to hold most, or that has been measured to."""
        return max(self.memory, key=lambda memory: _most(memory))


def _most(memory: Memory) -> float:
    whole = memory["allocated"]
    return whole.planned or whole.measured or 0.0


def compare_run(run: Run, calibration: str = "", traced: Sequence[Traced] = ()) -> Comparison:
    """`run` beside the plan of its job, made with the file `calibration` where it is given.

    Raises Refused where that cannot be read; a job that cannot be planned, such as for an unknown accelerator, is
    compared as far as that goes.
    """
    job, plan, unplanned = run.job, None, ""
    if run.on_cpu:
        job = replace(job, run=replace(job.run, device="cpu"))
    if calibration:
        inside = load_measured(calibration).gpus_per_node or job.cluster.gpus_per_node
        job = replace(job, cluster=replace(job.cluster, calibration=calibration, gpus_per_node=inside))
    try:
        plan = make_plan(job)
    except Refused as refused:
        if calibration:
            raise
        unplanned = "; ".join(map(str, refused.problems))
    middle, stages = middle_half(run.samples), range(job.parallel.pp)
    parts = tuple(_parts(plan, middle, stage) for stage in stages)
    return Comparison(
        run=run,
        plan=plan,
        unplanned=unplanned,
        same_machine=plan is not None and (not run.device or _same_machine(plan, run.device)),
        parts=parts,
        busiest=max(stages, key=lambda stage: _works(parts[stage], bool(middle))),
        slowest=_slowest(run.samples),
        memory=tuple(_memory(run, plan, stage, traced) for stage in stages),
        traffic=tuple(_traffic(job, found) for found in run.counted),
    )


def middle_half(samples: Sequence[Sample]) -> list[Sample]:
    """Samples without the quickest and the slowest quarter."""
    ordered = sorted(samples, key=lambda sample: sample.step_s)
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


def _parts(plan: Plan | None, samples: Sequence[Sample], stage: int) -> tuple[Figure, ...]:
    """Parts of the step on the ranks of a pipeline stage, those that nobody knows of left out."""
    planned = planned_parts(plan, stage) if plan else {}
    measured = {name: fmean(s.parts_s[stage][name] for s in samples) for name in PARTS} if samples else {}
    return tuple(
        Figure(name, planned.get(name), None, measured.get(name))
        for name in PARTS
        if planned.get(name) or measured.get(name)
    )


def planned_parts(plan: Plan, stage: int) -> dict[str, float]:
    """The planned step on the ranks of a pipeline stage by the parts of a sample; their sum is the step."""
    time, setup = plan.time, plan.setup
    mine = [chunk for place, chunk in enumerate(time.pipeline.stages) if setup.holder(place) == stage]
    m, beyond = setup.microbatches, time.parts_s
    busy_s = m * sum(chunk.total_s for chunk in mine)
    tp_s = m * sum(chunk.tp_s + chunk.cp_s + chunk.ep_s for chunk in mine)
    zero_s = m * sum(chunk.zero_s for chunk in mine)
    return {
        "compute": busy_s - tp_s - zero_s,
        "tp": tp_s,
        "zero": zero_s,
        "pipeline": time.pipeline_s - busy_s,
        **{name: beyond[name] for name in ("reduce", "gather", "tied", "optimizer")},
        "others": beyond["jitter"],
        "data": 0.0,
        "other": beyond["fixed"],
    }


def _works(parts: Sequence[Figure], measured: bool) -> float:
    """How long a stage computes."""
    return sum((f.measured if measured else f.planned) or 0.0 for f in parts if f.name == "compute")


def _same_machine(plan: Plan, device: str) -> bool:
    """Whether `device`, as torch names it, is what the plan is for."""
    if plan.job.cluster.calibration:
        about = plan.machine.measured.about
        return device == (about.get("accelerator") if about.get("device") == "cuda" else about.get("device"))
    return plan.machine.gpu.name.partition("-")[0] in device.lower()


def _slowest(samples: Sequence[Sample]) -> Slowest | None:
    """The rank that holds up its stage in more than half of the samples, by SLOW; with its median sample."""
    late = [s.slowest for s in samples if s.slowest and s.slowest.busy_s > SLOW * s.slowest.peers_s]
    if not late:
        return None
    ((rank, _),) = Counter(one.rank for one in late).most_common(1)
    mine = sorted((one for one in late if one.rank == rank), key=lambda one: one.busy_s / one.peers_s)
    return mine[len(mine) // 2] if len(mine) > max(1, len(samples) / 2) else None


def _memory(run: Run, plan: Plan | None, stage: int, traced: Sequence[Traced]) -> Memory:
    grid = grid_of(run.job)
    counted = run.counted[stage] if run.counted else None
    state = rank_state(run.job, counted.rank if counted else grid.rank(grid.coord(0)._replace(pp=stage)))
    trace = next((found for found in traced if stage in found.stages), None)
    memory = plan.stages[stage].memory if plan else None
    planned = _planned_bytes(plan, memory, run.on_cpu) if plan and memory else {}
    traces = {**trace.peak, "kept": trace.kept_bytes, "allocated": trace.peak_bytes} if trace else {}
    held = {name: max((sample.peaks[stage][name] for sample in run.samples), default=0) or None for name in PEAKS}
    if run.on_cpu:
        held["allocated"] = held["grown"]
    figures = [
        Figure(
            name,
            planned=state[name],
            traced=trace.state[name] if trace else None,
            measured=counted.numbers[name] if counted else None,
            exact=True,
        )
        for name in STATE
    ]
    figures += [Figure(name, planned.get(name), traces.get(name), None) for name in MOVING]
    wholes = ("kept", "allocated") if run.on_cpu else ("kept", "allocated", "reserved", "device")
    figures = [f for f in figures if max(f.planned or 0, f.traced or 0, f.measured or 0) >= FEWEST]
    known = [Figure(name, planned.get(name), traces.get(name), held[name]) for name in wholes]
    figures += [f for f in known if (f.planned, f.traced, f.measured) != (None, None, None)]
    return Memory(stage, tuple(figures), plan.stages[stage].margin_bytes if plan else None)


def _planned_bytes(plan: Plan, memory: StageMemory, on_cpu: bool) -> dict[str, float]:
    """What is planned of a stage beside its state. kept: of what is there at its fullest moment, all that is there
    between two actions as well."""
    use = memory.use
    moving = (use.activations, use.logits, use.buffers, use.transients)
    planned = dict(zip(MOVING, moving, strict=True))
    if use.moment in ("loss", "block"):
        # What the head makes again in its backward it does not keep until then.
        again = plan.setup.at(plan.setup.pp * plan.setup.virtual - 1).recompute == "full"
        step = step_for(plan.job.model, plan.job.cluster, plan.software, number_format(plan.job))
        worked = step.memory.unit("head", plan.setup.cut, "none").working
        planned["kept"] = use.activations + use.buffers + (0.0 if again else max(0.0, use.logits - worked))
    absent = sum(memory.ledger[name] for name in GPU_ONLY)
    allocated = memory.total_bytes - absent if on_cpu else memory.allocated_bytes
    return {**planned, "allocated": allocated, "reserved": memory.reserved_bytes, "device": memory.total_bytes}


def _traffic(job: Job, found: Counted) -> tuple[Figure, ...]:
    wanted = planned_counts(job, found.rank)
    return tuple(
        Figure(name, wanted.get(name, 0), None, found.numbers.get(name, 0), True)
        for name in sorted(wanted.keys() | found.numbers.keys())
        if name not in STATE
    )
