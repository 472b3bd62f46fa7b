"""The plan of a job: what every stage holds, how long a step takes, and what to mind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache

from trigrid.blueprint.decoder import parameter_count
from trigrid.blueprint.flops import train_flops_per_token
from trigrid.errors import Problem, Refused
from trigrid.plan.beside import communicators, pairs
from trigrid.plan.goodput import goodput
from trigrid.plan.machine import UNMEASURED, Machine, make_machine
from trigrid.plan.measured_file import load_measured
from trigrid.plan.memory import StageMemory
from trigrid.plan.notes import Note, notes
from trigrid.plan.setup import Setup
from trigrid.plan.software import Software, engine_software
from trigrid.plan.step import Step, StepTime
from trigrid.spec.cluster import Cluster
from trigrid.spec.gpu import load_gpu
from trigrid.spec.job import Job
from trigrid.spec.layout import zero_policy
from trigrid.spec.model import ModelSpec

SCHEMA = "trigrid.plan/1"
SAFE, TIGHT, DOES_NOT_FIT = "SAFE", "TIGHT", "DOES NOT FIT"


@dataclass(frozen=True)
class Interval:
    low: float
    best: float
    high: float


@dataclass(frozen=True)
class Stage:
    """A pipeline rank's memory. margin_bytes: what the model may be wrong by and does not itemise."""

    stage: int
    layers: int
    memory: StageMemory
    margin_bytes: int
    verdict: str


@dataclass(frozen=True)
class Training:
    """What a number of tokens takes. cost: in the currency of the cluster's price, None without one."""

    seconds: float
    energy_kwh: float
    cost: float | None


@dataclass(frozen=True)
class Plan:
    """Everything that is known of `job` before it runs. traffic_bytes: by axis, sent by one rank of the fullest stage.

    time: the best guess with its parts, links and stages, its schedule replayed.
    """

    job: Job
    software: Software
    setup: Setup
    machine: Machine
    parameters: int
    ceiling_bytes: int
    stages: tuple[Stage, ...]
    time: StepTime
    step_s: Interval
    tokens_per_s: float
    mfu_full_attention: float
    mfu_causal: float
    traffic_bytes: Mapping[str, float]
    warnings: tuple[Note, ...]
    assumptions: tuple[str, ...]
    facts: Mapping[str, object]

    def fits(self, hbm_bytes: int | None = None) -> bool:
        """Whether every stage is below the ceiling, or below `hbm_bytes`."""
        ceiling = hbm_bytes or self.ceiling_bytes
        return all(stage.memory.total_bytes <= ceiling for stage in self.stages)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.setup.world

    @property
    def fullest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.memory.total_bytes)

    def training(self, tokens: float) -> Training:
        """Time, energy and cost of `tokens` tokens, every GPU productive all the time (see goodput.py)."""
        cluster, seconds = self.job.cluster, tokens / self.tokens_per_s
        power = cluster.power_w or self.machine.gpu.power_w
        kwh = seconds * self.setup.world * power * cluster.pue / 3.6e6
        cost = seconds / 3600 * self.setup.world * cluster.price if cluster.price else None
        return Training(seconds, kwh, cost)


def setup_of(job: Job, software: Software) -> Setup:
    """The plain numbers of a job's layout and batch."""
    layout, batch, policy = job.parallel, job.batch, zero_policy(job.parallel)
    return Setup(
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        dp_replicate=layout.dp_replicate,
        zero=layout.zero,
        gather_per_use=policy.gather_per_use,
        reduce_per_microbatch=policy.reduce_per_microbatch,
        schedule=layout.schedule,
        virtual=layout.virtual_stages,
        micro_batch=batch.micro_batch,
        microbatches=max(1, batch.microbatches(layout)),
        sequence=batch.sequence,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        stage_layers=layout.stage_layers,
        order=layout.order,
        imbalance=software.imbalance,
        bucket_numel=layout.bucket_numel,
    )


def machine_of(cluster: Cluster) -> Machine:
    """The cluster's accelerator and networks; zeros are the catalogue's. Raises Refused for a calibration that cannot
    be read."""
    return make_machine(
        load_gpu(cluster.gpu),
        gpus_per_node=cluster.gpus_per_node,
        nodes_per_leaf=cluster.nodes_per_leaf,
        nic_Bps=cluster.nic_gbit * 1e9 / 8,
        nvlink_Bps=cluster.nvlink_gb_s * 1e9,
        oversubscription=cluster.oversubscription,
        measured=load_measured(cluster.calibration) if cluster.calibration else UNMEASURED,
    )


@lru_cache(maxsize=32)
def step_for(model: ModelSpec, cluster: Cluster, software: Software, number_format: str) -> Step:
    """What prices steps of `model` on `cluster`; the same object for the same question, with all that it has priced."""
    return Step(model, machine_of(cluster), software, number_format)


@lru_cache(maxsize=256)
def _counts(model: ModelSpec, sequence: int) -> tuple[int, float, float]:
    """Parameters, and model FLOPs of a token in both conventions."""
    full, causal = (train_flops_per_token(model, sequence, causal=causal) for causal in (False, True))
    return parameter_count(model), full, causal


def make_plan(job: Job, software: Software | None = None) -> Plan:
    """The plan of a sound job; the schedule is replayed. software: this project's engine where it is left out.

    Raises Refused for an accelerator that the catalogue lacks, or that does not multiply the job's number format, and
    for a schedule_file that is not for the job.
    """
    software = software or engine_software(job)
    if job.parallel.schedule == "auto" or job.parallel.schedule_file:
        from trigrid.plan.unnamed import unnamed_plan

        return unnamed_plan(job, software)
    name = number_format(job)
    step = step_for(job.model, job.cluster, software, name)
    setup, memory, machine = setup_of(job, software), step.memory, step.machine
    ceiling, margin = machine.gpu.hbm_bytes, machine.values["interval.memory"]
    stages = []
    for rank in range(setup.pp):
        use = memory.use(setup, rank, exact=True)
        ledger = memory.ledger(setup, use)
        unmodelled, verdict = judged(ledger.total_bytes, ceiling, margin)
        stages.append(Stage(rank, use.layers, StageMemory(use, ledger), unmodelled, verdict))
    timed = step.time(setup, play=True)
    spread = machine.values["interval.time"]
    tokens = job.batch.global_batch * job.batch.sequence / timed.step_s
    parameters, full, causal = _counts(job.model, job.batch.sequence)
    peak = setup.world * machine.gpu.peak_flops[name]
    return Plan(
        job=job,
        software=software,
        setup=setup,
        machine=machine,
        parameters=parameters,
        ceiling_bytes=ceiling,
        stages=tuple(stages),
        time=timed,
        step_s=Interval(timed.step_s * (1 - spread), timed.step_s, timed.step_s * (1 + spread)),
        tokens_per_s=tokens,
        mfu_full_attention=tokens * full / peak,
        mfu_causal=tokens * causal / peak,
        traffic_bytes=step.traffic_bytes(setup),
        warnings=notes(step, setup, timed, max(s.memory.total_bytes for s in stages), ceiling, tokens * full / peak),
        assumptions=_assumptions(job, software, machine),
        facts=_facts(job, software, machine, setup, step, stages),
    )


def judged(total_bytes: float, ceiling_bytes: int, share: float) -> tuple[int, str]:
    """What so many bytes of a stage may be wrong by, a `share` of them, and whether they fit."""
    unmodelled = round(total_bytes * share)
    if total_bytes > ceiling_bytes:
        return unmodelled, DOES_NOT_FIT
    return unmodelled, TIGHT if total_bytes + unmodelled > ceiling_bytes else SAFE


def number_format(job: Job) -> str:
    """The format of the job's products, as the catalogue names it. Nobody buys accelerators for fp64: it counts as
    fp32."""
    name = "bf16" if job.run.precision == "bf16" else "fp32"
    formats = machine_of(job.cluster).gpu.formats
    if name in formats or "fp16" in formats:
        return name if name in formats else "fp16"
    reason = f"{job.cluster.calibration or job.cluster.gpu} has no rate of products in {name}"
    raise Refused([Problem("run.precision", job.run.precision, reason, formats)])


def _assumptions(job: Job, software: Software, machine: Machine) -> tuple[str, ...]:
    gpu, cluster = machine.gpu, job.cluster
    found = [
        f"accelerator {gpu.name}: {gpu.source}",
        f"software {software.name}: {software.policy.total} bytes of state per parameter ({software.policy.name})",
        f"{machine.gpus_per_node} GPUs in an NVLink domain, {machine.nodes_per_leaf} domains under a leaf",
    ]
    if cluster.calibration:
        found.insert(0, machine.measured.told)
        if machine.measured.presumed:
            found.insert(1, f"not measured but presumed: {', '.join(machine.measured.presumed)}")
    if not cluster.nic_gbit and not cluster.calibration:
        found.append(f"NIC of {gpu.nic_Bps * 8 / 1e9:g} Gb/s per GPU: the catalogue's")
    if not cluster.power_w and not gpu.power_w:
        found.append("power is not known and counts as none: cluster.power_w")
    elif not cluster.power_w:
        found.append(f"power of {gpu.power_w:g} W per GPU: the catalogue's, without the rest of the server")
    found.append(f"slowest rank: {machine.values['jitter.share']:.0%} of the step at 1,024 copies and more")
    if job.optimizer.frozen and not software.traced:
        found.append("what frozen layers keep for backward is planned as if they were trained")
    if job.run.compile:
        found.append("time and memory are those of the program before it is compiled (run.compile)")
    if told := _of_products(job, machine):
        found.append(told)
    if job.parallel.bucket_numel:
        found.append("collectives take the time that they would with a bucket for each unit")
    if job.model.experts:
        found.append(f"experts are chosen with an imbalance of {software.imbalance:g}")
    return tuple(found)


def _of_products(job: Job, machine: Machine) -> str:
    """What the rate of fp32 products says nothing of, where the job computes them in another way."""
    name, measured = job.run.matmul_precision, machine.measured.about.get("matmul_precision", "highest")
    if job.run.precision != "fp32" or name == measured:
        return ""
    source = "measured" if machine.measured.products else "planned"
    return f"products are {source} with matmul_precision = {measured}: {name} may be faster or slower"


def _facts(
    job: Job, software: Software, machine: Machine, setup: Setup, step: Step, stages: list[Stage]
) -> Mapping[str, object]:
    """What explanations may name."""
    policy, model, groups = software.policy, job.model, step.groups(setup)
    fullest = max(stages, key=lambda stage: stage.memory.total_bytes)
    sizes = ("weights", "master", "gradients", "moments")
    return {
        **machine.values,
        **{f"policy.{name}": getattr(policy, name) for name in sizes},
        **{f"tier.{name}": getattr(groups, name).tier.name for name in ("tp", "cp", "ep", "zero")},
        **setup._asdict(),
        "virtual_stages": setup.virtual,
        "world": setup.world,
        "global_batch": job.batch.global_batch,
        "parameters_of_the_stage": fullest.memory.use.parameters,
        "communicators": communicators(setup, software.own_groups),
        "pairs": pairs(setup),
        "gpu": machine.gpu.name,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "kv_heads": model.kv_heads,
        "loss": software.kernels.loss,
        "overlap_tp": software.overlap_tp,
        "overlap_dp": software.overlap_dp,
        "generation": software.generation,
    }


def as_json(plan: Plan) -> dict[str, object]:
    """The plan by the contract `trigrid.plan/1`: what is here stays, more may come."""
    layout, time, kept = plan.job.parallel, plan.time, goodput(plan.setup.world)
    path = plan.job.cluster.calibration
    return {
        "schema": SCHEMA,
        "model": {"name": plan.job.model.name, "parameters": plan.parameters},
        "layout": {
            "tp": layout.tp,
            "cp": layout.cp,
            "pp": layout.pp,
            "dp": layout.dp,
            "ep": layout.ep,
            "zero": layout.zero,
            "schedule": layout.schedule,
            "virtual_stages": layout.virtual_stages,
            "micro_batch": plan.job.batch.micro_batch,
            "global_batch": plan.job.batch.global_batch,
            "recompute": layout.recompute,
        },
        "software": {"name": plan.software.name, "policy": plan.software.policy.name},
        "calibration": dict(plan.machine.measured.about) | {"path": path} if path else None,
        "memory": {
            "ceiling_bytes": plan.ceiling_bytes,
            "stages": [
                {
                    "stage": stage.stage,
                    "total_bytes": stage.memory.total_bytes,
                    "by_category": dict(stage.memory.ledger.bytes),
                    "allocated_bytes": stage.memory.allocated_bytes,
                    "reserved_bytes": stage.memory.reserved_bytes,
                    "margin_bytes": stage.margin_bytes,
                    "moment": stage.memory.use.moment,
                    "verdict": stage.verdict,
                }
                for stage in plan.stages
            ],
        },
        "fits": plan.fits(),
        "time": {
            "step_s": {"low": plan.step_s.low, "best": plan.step_s.best, "high": plan.step_s.high},
            "bubble_ratio": time.bubble_ratio,
            "idle_share": time.idle_share,
            "parts_s": dict(time.parts_s),
            "links_s": dict(time.links_s),
        },
        "throughput": {
            "tokens_per_s": plan.tokens_per_s,
            "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
            "mfu_full_attention": plan.mfu_full_attention,
            "mfu_causal": plan.mfu_causal,
        },
        "traffic_bytes": dict(plan.traffic_bytes),
        "goodput": asdict(kept) | {"productive_share": kept.productive_share},
        "warnings": [{"code": note.code, "message": note.message} for note in plan.warnings],
        "assumptions": list(plan.assumptions),
    }
