"""A simulated step for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from trigrid.plan.goodput import goodput
from trigrid.plan.simulate import COLLECTIVES, Simulation
from trigrid.plan.stragglers import Failure, Faults, Replicas, Statistics, Straggler
from trigrid.report.console import duration, table
from trigrid.report.plan import WIDTH
from trigrid.report.timeline import timeline_text
from trigrid.report.units import gib, seconds

SCHEMA = "trigrid.simulate/1"
MOST_RANKS = 32
"""Rows of the table; of more ranks, the first and the last."""


def simulation_text(simulation: Simulation, width: int) -> str:
    """The step, the picture of its pipeline, and what each rank does and holds."""
    timeline, schedule = simulation.timeline, simulation.schedule
    source = "the durations given" if simulation.given else "the planner's durations"
    blocks = [
        f"{simulation.job.model.name}: schedule {schedule.name}, {len(timeline.busy_s)} ranks, "
        f"{schedule.stages} stages, {schedule.microbatches} microbatches, with {source}",
        *_summary(simulation),
        "",
        timeline_text(timeline, width),
        "",
        _ranks(simulation),
    ]
    return "\n".join(blocks)


def _summary(simulation: Simulation) -> list[str]:
    timeline = simulation.timeline
    beyond = ", ".join(f"{name} {seconds(took)}" for name, took in simulation.stages.beyond_s.items() if took)
    lines = [
        f"  step          {seconds(simulation.step_s)}: pipeline {seconds(timeline.step_s)}"
        + (f", beyond it {beyond}" if beyond else ""),
        f"  bubble_ratio  {timeline.bubble_ratio:.1%} (idle ÷ busy); "
        f"idle_share {timeline.idle_share:.1%} (idle ÷ pipeline)",
    ]
    if auto := simulation.auto:
        text = f"{auto.gap:.1%} above what no schedule can beat ({seconds(auto.bound_s)})"
        if auto.named:
            text += f"; {auto.named}, the best of the named ones within the same memory, takes {seconds(auto.named_s)}"
        lines.append(f"  auto          {text}")
    return [line for text in lines for line in wrap(text, WIDTH, subsequent_indent=" " * 16, drop_whitespace=True)]


def _ranks(simulation: Simulation) -> str:
    timeline = simulation.timeline
    count = len(timeline.busy_s)
    shown = [name for name in COLLECTIVES if any(simulation.exposed_s(rank)[name] for rank in range(count))]
    half = MOST_RANKS // 2
    ranks = range(count) if count <= MOST_RANKS else [*range(half), *range(count - half, count)]
    rows = []
    for rank in ranks:
        exposed, waits = simulation.exposed_s(rank), simulation.waits[rank]
        peak = max((size for _, size in simulation.memory[rank]), default=0)
        rows.append(
            [
                str(rank),
                seconds(timeline.busy_s[rank]),
                f"{timeline.bubble_ratios[rank]:.1%}",
                f"{timeline.idle_shares[rank]:.1%}",
                seconds(waits.message_s),
                *(seconds(exposed[name]) for name in shown),
                gib(peak),
                gib(simulation.stages.state_bytes[rank] + peak),
            ]
        )
    names = [f"{name} exposed" for name in shown]
    header = ["rank", "busy", "bubble_ratio", "idle_share", "P2P exposed", *names, "in flight GiB", "with state"]
    lines = table(header, rows).splitlines()
    if count > MOST_RANKS:
        lines.insert(1 + half, f"… {count - MOST_RANKS} ranks")
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def straggler_text(simulation: Simulation, found: Sequence[Straggler], together_s: float) -> str:
    """What each slow rank and link costs its pipeline, its data-parallel group, and all; then the step with all."""
    replicas, world = Replicas(simulation.stages.setup), simulation.stages.setup.world
    lines = []
    for one in found:
        group = one.group_s[one.at.pp]
        text = (
            f"{one.name} (dp {one.at.dp}, pp {one.at.pp}, cp {one.at.cp}, tp {one.at.tp}): its pipeline takes "
            f"{seconds(one.pipeline_s)} longer ({one.pipeline_s / simulation.timeline.step_s:+.1%}); "
            + (f"{one.lockstep - 1} GPUs move in lockstep with it; " if one.lockstep > 1 else "")
            + (
                f"the rest of its data-parallel group waits {seconds(group)}, of other groups up to "
                f"{seconds(max(one.group_s))}; "
                if replicas.pipelines > 1
                else ""
            )
            + f"in all the step takes {one.pipeline_s / simulation.step_s:+.1%}, "
            f"{one.gpu_s:,.0f} GPU-seconds a step on {world:,} GPUs"
        )
        lines += wrap(text, WIDTH, subsequent_indent="  ")
    if len(found) > 1:
        lines.append(f"all at once: the step takes {together_s:.4g} s ({together_s / simulation.step_s - 1:+.1%})")
    return "\n".join(lines)


def failure_text(simulation: Simulation, found: Sequence[Failure]) -> str:
    """Who waits for what after ranks stopped, and what failures cost in the long run."""
    replicas, setup = Replicas(simulation.stages.setup), simulation.stages.setup
    lines = []
    for failure in found:
        rows = [
            [
                str(number),
                str(one.last or "nothing"),
                seconds(one.since_s),
                str(one.waits_at or "the reduction of gradients"),
            ]
            for number, one in enumerate(failure.ranks)
        ]
        stops = ", ".join(f"rank {rank} stops {seconds(time_s)}" for rank, time_s in failure.stops)
        lines += wrap(f"{stops} after the pipeline began:", WIDTH)
        told = table(["pipeline rank", "finished last", "at", "never finishes"], rows).splitlines()
        lines += [f"  {line.rstrip()}" for line in told]
    left = replicas.pipelines - len(found)
    others = (
        f"the other {left:,} pipelines wait at the reduction from "
        f"{seconds(simulation.timeline.step_s)} on; then all {setup.world:,} GPUs stand still until the run is stopped"
    )
    kept = goodput(setup.world)
    steps = max(1, round(kept.mtbf_job_s / simulation.step_s))
    rate = (
        f"at Llama 3's rate of failures one comes every {duration(kept.mtbf_job_s)}, or {steps:,} steps; with a "
        f"checkpoint every {duration(kept.interval_s)}, {kept.productive_share:.1%} of the time counts"
    )
    texts = [others, rate] if left else [rate]
    return "\n".join([*lines, *(line for text in texts for line in wrap(text, WIDTH))])


def statistics_text(simulation: Simulation, faults: Faults, found: Statistics) -> str:
    """Steps with jitter over the repetitions."""
    replicas, setup, usual = Replicas(simulation.stages.setup), simulation.stages.setup, simulation.step_s
    figures = [("mean", found.mean_s), ("p50", found.p50_s), ("p95", found.p95_s), ("max", found.max_s)]
    steps = ", ".join(f"{name} {value:.4g} s ({value / usual - 1:+.1%})" for name, value in figures)
    how = f"{found.played:,} pipelines played"
    if found.drawn:
        how += f", the slowest of {replicas.pipelines:,} drawn from them in each repetition"
    text = (
        f"{faults.repetitions:,} repetitions on {setup.world:,} GPUs, {replicas.pipelines:,} pipelines of {setup.pp} "
        f"stages, {replicas.lockstep:,} GPUs in lockstep in each; jitter {faults.jitter:g}, seed {faults.seed}: {how}"
    )
    return "\n".join([*wrap(text, WIDTH), *wrap(f"  step: {steps}", WIDTH, subsequent_indent="  ")])


def simulation_json(
    simulation: Simulation,
    faults: Faults,
    slow: Sequence[Straggler],
    together_s: float | None,
    failed: Sequence[Failure],
    spread: Statistics | None,
) -> dict[str, Any]:
    """The simulation by the contract `trigrid.simulate/1`: what is here stays, more may come."""
    timeline, auto = simulation.timeline, simulation.auto
    return {
        "schema": SCHEMA,
        "model": simulation.job.model.name,
        "schedule": simulation.schedule.name,
        "microbatches": simulation.schedule.microbatches,
        "placement": list(simulation.schedule.placement),
        "durations": {
            "given": simulation.given,
            "forward_s": list(simulation.durations.forward_s),
            "backward_s": list(simulation.durations.backward_s),
            "input_s": list(simulation.durations.input_s),
            "weight_s": list(simulation.durations.weight_s),
            "p2p_s": list(simulation.durations.p2p_s),
        },
        "step_s": simulation.step_s,
        "pipeline_s": timeline.step_s,
        "beyond_s": dict(simulation.stages.beyond_s),
        "bubble_ratio": timeline.bubble_ratio,
        "idle_share": timeline.idle_share,
        "ranks": [
            {
                "rank": rank,
                "busy_s": timeline.busy_s[rank],
                "bubble_ratio": timeline.bubble_ratios[rank],
                "idle_share": timeline.idle_shares[rank],
                "p2p_exposed_s": simulation.waits[rank].message_s,
                "collectives_exposed_s": dict(simulation.exposed_s(rank)),
                "state_bytes": simulation.stages.state_bytes[rank],
                "peak_in_flight_bytes": max((size for _, size in simulation.memory[rank]), default=0),
                "in_flight": [{"time_s": time_s, "bytes": size} for time_s, size in simulation.memory[rank]],
            }
            for rank in range(len(timeline.busy_s))
        ],
        "auto": {
            "bound_s": auto.bound_s,
            "gap": auto.gap,
            "named": auto.named,
            "named_s": auto.named_s if auto.named else None,
        }
        if auto
        else None,
        "stragglers": [{**one._asdict(), "at": one.at._asdict(), "group_s": list(one.group_s)} for one in slow],
        "together_s": together_s,
        "failure": _failure_json(failed[0]) if failed else None,
        "failures": [_failure_json(one) for one in failed],
        "repetitions": {
            "repetitions": faults.repetitions,
            "jitter": faults.jitter,
            "seed": faults.seed,
            "mean_s": spread.mean_s,
            "p50_s": spread.p50_s,
            "p95_s": spread.p95_s,
            "max_s": spread.max_s,
            "played": spread.played,
            "drawn": spread.drawn,
        }
        if spread
        else None,
    }


def _failure_json(failure: Failure) -> dict[str, Any]:
    rank, time_s = failure.stops[0]
    return {
        "rank": rank,
        "time_s": time_s,
        "pipeline": failure.pipeline,
        "stops": [{"rank": rank, "time_s": time_s} for rank, time_s in failure.stops],
        "pipeline_ranks": [
            {
                "last": str(one.last) if one.last else None,
                "since_s": one.since_s,
                "waits_at": str(one.waits_at) if one.waits_at else None,
            }
            for one in failure.ranks
        ],
    }
