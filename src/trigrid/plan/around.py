"""What lies around a layout: each knob one notch up and down, and why a search chose as it did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trigrid.plan.found import Found
from trigrid.plan.layouts import job_of
from trigrid.plan.plan import number_format, setup_of, step_for
from trigrid.plan.search import selective_drops
from trigrid.plan.setup import Setup
from trigrid.plan.software import Software
from trigrid.plan.space import KNOBS, Space
from trigrid.plan.step import Step
from trigrid.schedule import NAMES
from trigrid.spec.gpu import GIB, gpus
from trigrid.spec.job import Job
from trigrid.spec.layout import V_SHAPED, Layout
from trigrid.spec.rules import check

ENGINE = "trigrid"
"""The software whose kernels a job decides."""


@dataclass(frozen=True)
class Price:
    """A layout replayed: seconds, their parts, and bytes of the fullest stage."""

    setup: Setup
    step_s: float
    bytes: float
    parts_s: Mapping[str, float]


@dataclass(frozen=True)
class Move:
    """One knob at another value. price: None where a rule forbids it, for the reason `illegal`."""

    knob: str
    value: str
    price: Price | None
    illegal: str = ""


@dataclass(frozen=True)
class Why:
    """Why a knob has its value: in one sentence, what the values next to it cost or which limit they break."""

    knob: str
    value: str
    reason: str


class Around:
    """Prices what is near one layout of a job."""

    def __init__(self, job: Job, software: Software, available: int | None = None):
        self.job, self.software = job, software
        self.gpus = available or job.parallel.world
        self.setup = setup_of(job, software)
        self.step: Step = step_for(job.model, job.cluster, software, number_format(job))
        self.ceiling = self.step.machine.gpu.hbm_bytes
        self.here = self.price(self.setup, self.step)

    def price(self, setup: Setup, step: Step) -> Price:
        memory = step.memory
        peak = max(memory.device_bytes(setup, memory.use(setup, rank, exact=True)) for rank in range(setup.pp))
        timed = step.time(setup, play=True)
        return Price(setup, timed.step_s, peak, timed.parts_s)

    # Layout knobs

    def moves(self, knob: str) -> Iterator[Move]:
        """Each knob of KNOBS at the values next to the one that it has."""
        for value, setup in self._next(knob):
            if setup is None:
                yield Move(knob, value, None, f"no dp is left for it on {self.gpus:,} GPUs")
                continue
            problems = check(job_of(self.job, setup))
            if problems:
                yield Move(knob, value, None, problems[0].reason)
            else:
                yield Move(knob, value, self.price(setup, self.step))

    def _next(self, knob: str) -> Iterator[tuple[str, Setup | None]]:
        setup = self.setup
        match knob:
            case "tp" | "cp" | "pp":
                here = int(getattr(setup, knob))
                for value in dict.fromkeys((max(1, here // 2), here * 2)):
                    if value != here:
                        degrees = {"tp": setup.tp, "cp": setup.cp, "pp": setup.pp, knob: value}
                        moved = setup._replace(tp=degrees["tp"], cp=degrees["cp"], pp=degrees["pp"])
                        yield str(value), self._refitted(moved)
            case "micro_batch":
                here, share = setup.micro_batch, setup.micro_batch * setup.microbatches
                below = [n for n in range(1, here) if share % n == 0]
                above = next((n for n in range(here + 1, share + 1) if share % n == 0), None)
                for size in (*below[-1:], *([above] if above else [])):
                    yield str(size), setup._replace(micro_batch=size, microbatches=share // size)
            case "zero":
                for stage in (setup.zero - 1, setup.zero + 1):
                    if 0 <= stage <= 3:
                        preset = setup._replace(gather_per_use=stage == 3, reduce_per_microbatch=stage >= 2)
                        yield str(stage), preset._replace(zero=stage)
            case "gather" if setup.zero == 3:
                other = not setup.gather_per_use
                yield "per_use" if other else "per_step", setup._replace(gather_per_use=other)
            case "reduce" if setup.zero >= 1:
                other = not setup.reduce_per_microbatch
                yield "per_microbatch" if other else "per_step", setup._replace(reduce_per_microbatch=other)
            case "schedule" if setup.pp > 1:
                for name in NAMES:
                    if name != setup.schedule:
                        chunks = 2 if name in V_SHAPED else max(2, setup.virtual) if name == "interleaved" else 1
                        yield name, setup._replace(schedule=name, virtual=chunks)
            case "virtual_stages" if setup.schedule == "interleaved":
                for chunks in (setup.virtual - 1, setup.virtual + 1):
                    if chunks > 1:
                        yield str(chunks), setup._replace(virtual=chunks)
            case "recompute":
                for mode in ("none", "selective", "full"):
                    if mode != setup.recompute and (mode != "selective" or selective_drops(self.job, self.software)):
                        yield mode, setup._replace(recompute=mode)
            case "ep" if self.job.model.experts:
                for degree in dict.fromkeys((max(1, setup.ep // 2), setup.ep * 2)):
                    if degree != setup.ep:
                        yield str(degree), setup._replace(ep=degree)
            case "dp_replicate" if setup.dp > 1:
                for copies in dict.fromkeys((max(1, setup.dp_replicate // 2), setup.dp_replicate * 2)):
                    if copies != setup.dp_replicate and setup.dp % copies == 0:
                        yield str(copies), setup._replace(dp_replicate=copies)

    def _refitted(self, setup: Setup) -> Setup | None:
        """`setup` with the dp that the GPUs allow beside its other degrees."""
        space = Space(job_of(self.job, setup), frozenset({"dp"}), self.gpus, setup)
        dp = space.data_parallel(setup.tp * setup.cp * setup.pp)
        if not dp:
            return None
        batch = self.job.batch.global_batch // (dp * setup.micro_batch)
        copies = setup.dp_replicate if dp % setup.dp_replicate == 0 else 1
        return setup._replace(dp=dp, microbatches=batch, dp_replicate=copies, stage_layers=())

    # Kernels

    def kernels(self) -> Iterator[Move]:
        """What the engine keeps for backward of gathered inputs and of logits, the other way; other trainers have no
        such keys."""
        layout = self.job.parallel
        if self.software.name != ENGINE:
            return
        changes: list[tuple[str, object]] = []
        if layout.tp > 1 and layout.sequence_parallel:
            changes.append(("regather", not layout.regather))
        pieces = (1, 4 * layout.loss_chunks) if layout.loss_chunks > 1 else (4, 16)
        changes += [("loss_chunks", count) for count in pieces]
        for knob, value in changes:
            changed = replace(self.job, parallel=replace(layout, **{knob: value}))  # type: ignore[arg-type]
            shown = str(value).lower()
            if problems := check(changed):
                yield Move(knob, shown, None, problems[0].reason)
                continue
            software = _keeping(self.software, changed.parallel)
            step = step_for(changed.model, changed.cluster, software, number_format(changed))
            yield Move(knob, shown, self.price(self.setup, step))

    # Beyond the layout

    def surroundings(self) -> Iterator[Move]:
        """Batch, sequence and cluster at half and at twice what they are."""
        batch, cluster, gpu = self.job.batch, self.job.cluster, self.step.machine.gpu
        nic, link = self.step.machine.nic_Bps * 8 / 1e9, self.step.machine.nvlink_Bps / 1e9
        for times in (0.5, 2):
            size = int(batch.global_batch * times)
            yield self._other("global_batch", size, replace(self.job, batch=replace(batch, global_batch=size)))
        for times in (0.5, 2):
            length = int(batch.sequence * times)
            yield self._other("sequence", length, replace(self.job, batch=replace(batch, sequence=length)))
        # What a calibration measured of the networks does not follow from their nominal bandwidths.
        for times in () if cluster.calibration else (0.5, 2):
            yield self._other("nic_gbit", nic * times, self._in(replace(cluster, nic_gbit=nic * times)))
        for times in () if cluster.calibration else (0.5, 2):
            yield self._other("nvlink_gb_s", link * times, self._in(replace(cluster, nvlink_gb_s=link * times)))
        spine = cluster.oversubscription * 2
        yield self._other("oversubscription", spine, self._in(replace(cluster, oversubscription=spine)))
        bigger = sorted(
            (other for other in gpus().values() if other.peak_flops.keys() >= {"bf16"} and other.name != gpu.name),
            key=lambda other: abs(other.peak_flops["bf16"] - gpu.peak_flops.get("bf16", 0.0)),
        )
        for other in bigger[:2]:
            yield self._other("gpu", other.name, self._in(replace(cluster, gpu=other.name, calibration="")))

    def _in(self, cluster: object) -> Job:
        return replace(self.job, cluster=cluster)  # type: ignore[arg-type]

    def _other(self, knob: str, value: object, job: Job) -> Move:
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        if problems := check(job):
            return Move(knob, shown, None, problems[0].reason)
        step = step_for(job.model, job.cluster, self.software, number_format(job))
        return Move(knob, shown, self.price(setup_of(job, self.software), step))

    # Why

    def why(self, knob: str, opened: frozenset[str] = frozenset(KNOBS)) -> Why | None:
        """Why `knob` has its value; None where there is no other that leaves the knobs alone that are not `opened`."""
        clauses = [self._clause(move) for move in self.moves(knob) if self._allowed(move, opened)]
        if not clauses:
            return None
        here = getattr(self.setup, {"virtual_stages": "virtual"}.get(knob, knob), None)
        if knob in ("gather", "reduce"):
            per_use = self.setup.gather_per_use if knob == "gather" else self.setup.reduce_per_microbatch
            here = ("per_use" if knob == "gather" else "per_microbatch") if per_use else "per_step"
        return Why(knob, str(here), "; ".join(clauses))

    def _allowed(self, move: Move, opened: frozenset[str]) -> bool:
        if move.price is None:
            return True
        virtual, dp = move.price.setup.virtual, move.price.setup.dp
        return (virtual == self.setup.virtual or "virtual_stages" in opened) and (dp == self.setup.dp or "dp" in opened)

    def _clause(self, move: Move) -> str:
        if move.price is None:
            return f"{move.value} is not legal ({move.illegal})"
        if move.price.bytes > self.ceiling:
            return f"{move.value} needs {move.price.bytes / GIB:,.1f} GiB of {self.ceiling / GIB:.1f}"
        change = move.price.step_s / self.here.step_s - 1
        if abs(change) < 0.0005:
            more = (move.price.bytes - self.here.bytes) / GIB
            return f"{move.value} is as fast, {abs(more):.1f} GiB {'more' if more >= 0 else 'less'}"
        parts = {name: move.price.parts_s[name] - spent for name, spent in self.here.parts_s.items()}
        part = max(parts, key=lambda name: parts[name] if change > 0 else -parts[name])
        return (
            f"{move.value} takes {abs(change):.1%} {'longer' if change > 0 else 'less'} ({part} {parts[part]:+.3g} s)"
        )


def reasons(found: Found) -> tuple[Why, ...]:
    """Why each open knob of a search has its value."""
    around, opened = Around(found.job, found.software, found.space.gpus), found.space.open
    whys = (around.why(knob, opened) for knob in KNOBS if knob in opened and knob != "dp")
    return tuple(why for why in whys if why)


def sensitivity(job: Job, software: Software, available: int | None = None) -> tuple[Around, tuple[Move, ...]]:
    """Every knob one notch up and down, then kernels, batch, sequence and cluster."""
    around = Around(job, software, available)
    moves = [move for knob in KNOBS for move in around.moves(knob)]
    return around, (*moves, *around.kernels(), *around.surroundings())


# Recomputation


@dataclass(frozen=True)
class Recompute:
    """A way to keep less for backward, against keeping all: bytes saved on the fullest stage, share of the step that
    it costs."""

    what: str
    bytes: float
    step_s: float
    saved_bytes: float
    cost: float

    @property
    def gib_per_percent(self) -> float:
        """GiB saved for each % of the step."""
        return self.saved_bytes / GIB / max(self.cost * 100, 1e-9)


def recompute_table(job: Job, software: Software) -> tuple[Recompute, ...]:
    """No recomputation, then each kind, that which saves most for its time first: of blocks, of what sequence
    parallelism gathers, and of the logits, the last two as far as the software can."""
    layout = replace(job.parallel, regather=False, loss_chunks=1, recompute="none")
    around = Around(replace(job, parallel=layout), _keeping(software, layout))
    base = around.here
    # A stage of this project's engine recomputes all of its blocks or none.
    shares = (1.0,) if software.traced else (0.25, 0.5, 0.75, 1.0)
    kinds = [("selective", "selective", 1.0)]
    kinds += [(f"full, {share:.0%} of the blocks", "full", share) for share in shares]
    tried = [
        (what, around.price(around.setup._replace(recompute=mode, recomputed=share), around.step))
        for what, mode, share in kinds
    ]
    names = {"regather": "regather", "loss_chunks": "loss in {} chunks"}
    tried += [(names[move.knob].format(move.value), move.price) for move in around.kernels() if move.price]
    found = []
    for what, priced in tried:
        saved, cost = base.bytes - priced.bytes, priced.step_s / base.step_s - 1
        # Chunks of the loss save nothing where another stage than the last is the fullest: that is worth a line.
        if saved > 0 or what.startswith("loss"):
            found.append(Recompute(what, priced.bytes, priced.step_s, saved, cost))
    ranked = sorted(found, key=lambda row: -row.gib_per_percent)
    return (Recompute("none", base.bytes, base.step_s, 0.0, 0.0), *ranked)


def _keeping(software: Software, layout: Layout) -> Software:
    """`software` as it runs `layout`; of another trainer a job does not say what its kernels keep."""
    if software.name != ENGINE:
        return software
    loss: Literal["pieces", "fused"] = "pieces" if layout.loss_chunks > 1 else "fused"
    kernels = replace(software.kernels, regather=layout.regather, loss=loss, pieces=layout.loss_chunks)
    return replace(software, kernels=kernels)
