"""What a plan warns of: golden rules broken and traffic multiplied, each with its cost and the way out."""

from __future__ import annotations

from typing import NamedTuple

from trigrid.plan.setup import Setup
from trigrid.plan.step import Step, StepTime
from trigrid.spec.cluster import Tier

GIB = 2**30
SLOW_BUBBLE = 0.08


class Note(NamedTuple):
    code: str
    message: str


def notes(
    step: Step, setup: Setup, timed: StepTime, peak_bytes: int, ceiling_bytes: int, utilisation: float
) -> tuple[Note, ...]:
    """Warnings of a planned step, the dearest kinds first."""
    groups, parts = step.groups(setup), timed.parts_s
    found: list[Note] = []

    def note(code: str, message: str) -> None:
        found.append(Note(code, message))

    if peak_bytes > ceiling_bytes:
        over = (peak_bytes - ceiling_bytes) / GIB
        note("does-not-fit", f"the fullest stage needs {over:.1f} GiB more than the accelerator has{_less(setup)}")
    if groups.tp.tier > Tier.NVLINK:
        note(
            "tp-crosses-nodes",
            f"a tensor-parallel group of {setup.tp} crosses nodes ({groups.tp.tier.name.lower()}): "
            f"{parts['tp']:.3g} s of each step; tp of at most {groups.tp.inside} stays inside the NVLink domain",
        )
    if setup.pp > 1 and groups.neighbours > Tier.LEAF:
        note(
            "pp-crosses-spine",
            f"pipeline neighbours are under different leaves: {parts['p2p']:.3g} s of each step; "
            "with pp inside dp (order dp, pp, cp, tp) the spine carries gradients instead, which overlap",
        )
    if setup.gather_per_use and setup.microbatches > 1 and setup.shards > 1:
        times = 2 * setup.microbatches + (setup.microbatches if setup.reduce_per_microbatch else 1)
        kept = sum(step.memory.use(setup._replace(gather_per_use=False, zero=2), 0).state[:1]) / GIB
        note(
            "zero-traffic",
            f"weights are gathered twice for each of {setup.microbatches} microbatches: with the reductions {times} "
            f"times the stage's parameters a step and {parts['zero']:.3g} s exposed; gathering once a step costs "
            f"{kept:.1f} GiB instead",
        )
    if timed.bubble_ratio > SLOW_BUBBLE:
        stages = f", {setup.virtual} stages a rank" if setup.virtual > 1 else ""
        ranks = f"{setup.pp} ranks, {setup.microbatches} microbatches{stages}"
        note(
            "bubble",
            f"the pipeline idles {timed.bubble_ratio:.0%} of its busy time ({ranks}): {parts['idle']:.3g} s; "
            "more microbatches or virtual stages shrink it",
        )
    if setup.zero == 3 and groups.zero.nodes > 64:
        latency = groups.zero.nodes * step.machine.values["hop.nic_s"]
        note(
            "zero-latency",
            f"shards are spread over {groups.zero.nodes} nodes: {latency * 1e3:.2g} ms of each collective is latency; "
            "HSDP (dp_replicate) keeps groups small",
        )
    if utilisation > 1.0:
        note("mfu-above-1", f"{utilisation:.0%} of the peak is impossible: a shape or a constant is wrong")
    return tuple(found)


def _less(setup: Setup) -> str:
    """The first thing that would take less."""
    if setup.recompute != "full":
        return "; recomputation keeps only the blocks' inputs"
    if setup.zero == 0:
        return "; ZeRO-1 shards the optimizer"
    if setup.zero < 3:
        return "; ZeRO-3 shards weights and gradients, more pipeline stages hold fewer layers"
    return "; more pipeline or tensor parallelism holds less on each GPU"
