"""The largest difference between a plan and its run, in words that say no more than what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from trigrid.plan.plan import Plan, number_format
from trigrid.report.compare import Comparison, Figure
from trigrid.report.units import figures, rate, seconds, size

NAMES = {
    "compute": "compute",
    "tp": "tensor parallel, waited for",
    "zero": "ZeRO per use, waited for",
    "pipeline": "other stages, waited for",
    "reduce": "gradients reduced, waited for",
    "gather": "weights gathered, waited for",
    "tied": "tied embedding, waited for",
    "optimizer": "optimizer",
    "others": "slower ranks, waited for",
    "data": "data, waited for",
    "other": "the rest",
}
"""Of the parts of a step, for people."""
WAITS = ("tp", "zero", "reduce", "gather", "tied", "others")
NEAR = 1.15
"""Two rates within this factor are taken for the same."""


def time_gap(found: Comparison) -> str:
    """What makes the step longer or shorter than planned."""
    run, plan = found.run, found.plan
    if run.step_s is None:
        return "No step has been measured yet."
    if not run.samples:
        return "Where the time of its steps went is not known: none is sampled."
    parts = found.parts[found.busiest]
    if plan is None:
        return f"There is no plan of its times. {_longest(parts)}{_shared(found)}"
    if not found.same_machine:
        return (
            f"The plan is for {plan.machine.gpu.name} and the run was on {run.device}, so their times are those of two "
            f"machines: `trigrid calibrate` measures this one, and `trigrid compare RUN --calibration FILE` plans with "
            f"that. {_longest(parts)}{_shared(found)}"
        )
    apart = max(parts, key=lambda part: abs(part.gap or 0.0))
    step_s, low, high = run.step_s.median, plan.step_s.low, plan.step_s.high
    within = "The step is within the planned range. " if low <= step_s <= high else ""
    return f"{within}Largest gap in time: {_told(apart)}. {_meaning(found, plan, apart)}".rstrip()


def _longest(parts: Sequence[Figure]) -> str:
    most = max(parts, key=lambda part: part.measured or 0.0)
    whole = sum(part.measured or 0.0 for part in parts)
    return f"Most of the measured step is {NAMES[most.name]}: {(most.measured or 0.0) / whole:.0%}."


def _told(part: Figure) -> str:
    planned, measured = part.planned or 0.0, part.measured or 0.0
    times = f" ({figures(measured / planned)} times)" if planned > 0 and measured > 0 else ""
    return f"{NAMES[part.name]}: {seconds(measured)}, planned {seconds(planned)}{times}"


def _meaning(found: Comparison, plan: Plan, part: Figure) -> str:
    """What usually lies behind it, by what else was measured."""
    more = (part.gap or 0.0) > 0
    if part.name == "compute":
        return _of_compute(found, plan, more)
    if part.name == "data":
        return "The batch is late: data.workers reads more of them ahead."
    if part.name == "pipeline":
        return _of_stages(found) + _shared(found)
    if part.name in WAITS and more:
        late = _late(found) or _shared(found).strip()
        return late or (
            "Either its network is slower than the plan's, or ranks come to it at different times: `trigrid train JOB "
            "--trace STEP` shows which."
        )
    if part.name == "other" and more:
        return "It lies between the actions: the host's own work, Python among it."
    return ""


def _of_compute(found: Comparison, plan: Plan, more: bool) -> str:
    if late := _late(found):
        return late
    run, kind = found.run, number_format(plan.job)
    products = plan.machine.measured.products.get(kind)
    counted_Fps = products.flops if products else plan.machine.gemm_flops(kind)
    reached_Fps = run.products_Fps / plan.setup.world
    if not reached_Fps:
        return ""
    rates = (
        f"Matrix products ran at {rate(reached_Fps)} per rank when the run began; the plan counts on "
        f"{rate(counted_Fps)} for large ones"
    )
    if (counted_Fps / reached_Fps > NEAR) if more else (reached_Fps / counted_Fps > NEAR):
        other = "the machine is not the plan's, which `trigrid calibrate` would measure"
        if plan.job.cluster.calibration:
            other = "the machine is not as it was when it was calibrated, such as where something runs beside"
        return f"{rates}: {other}.{_shared(found)}"
    return f"{rates}: what differs lies in smaller products, beside the products, or came later.{_shared(found)}"


def _of_stages(found: Comparison) -> str:
    """Whether stages differ more than planned."""
    works = [next((f for f in parts if f.name == "compute"), None) for parts in found.parts]
    measured = [(f.measured or 0.0) if f else 0.0 for f in works]
    planned = [(f.planned or 0.0) if f else 0.0 for f in works]
    longest = max(range(len(measured)), key=measured.__getitem__)
    mean, expected = sum(measured) / len(measured), sum(planned) / len(planned)
    if not mean or not expected:
        return ""
    uneven, foreseen = measured[longest] / mean, planned[longest] / expected
    if uneven > NEAR * foreseen:
        return (
            f"Stage {longest} computes {uneven:.2f} times as long as the mean of all stages, planned "
            f"{foreseen:.2f}: the others wait for it."
        )
    return _late(found) or "Stages compute about as unequally as planned: messages are late, or actions vary."


def _late(found: Comparison) -> str:
    slow = found.slowest
    if slow is None:
        return ""
    return (
        f"Rank {slow.rank} works {slow.busy_s / slow.peers_s:.2f} times as long as the other ranks of its stage "
        f"({seconds(slow.busy_s)} and {seconds(slow.peers_s)} of a step): they wait for it."
    )


def _shared(found: Comparison) -> str:
    """Of ranks that take turns on cores, for which a wait is often one for a core."""
    cores = found.run.cores
    if cores is None or cores >= 1:
        return ""
    return f" {found.run.job.parallel.world} ranks share cores, {cores:g} each: what waits also waits for its turn."


def memory_gap(found: Comparison) -> str:
    """Whether state and traffic are as planned, and what differs most of the rest."""
    run, world = found.run, found.run.job.parallel.world
    if run.unlike_ranks:
        return (
            f"State or traffic is not as planned on {run.unlike_ranks:,} of {world:,} ranks: {'; '.join(run.unlike)}."
        )
    if not run.counted:
        return "State and traffic have not been counted."
    who = "the rank" if world == 1 else f"all {world:,} ranks"
    same = f"State and traffic are as planned, to the byte, on {who}."
    memory = found.fullest
    whole = memory["kept" if run.on_cpu else "allocated"]
    if whole.gap is None or not whole.planned or whole.measured is None:
        return same
    kind = "kept between actions" if run.on_cpu else "allocated at most"
    off = f"{whole.gap / whole.planned:+.1%}"
    told = f"{kind} {size(round(whole.measured))}, planned {size(round(whole.planned))} ({off})"
    beyond = memory.margin is not None and whole.gap > memory.margin
    margin = f", more than the plan's margin of {size(memory.margin or 0)}" if beyond and not run.on_cpu else ""
    place = f"On stage {memory.stage}: {told}" if len(found.memory) > 1 else f"{told[0].upper()}{told[1:]}"
    return f"{same} {place}{margin}."
