"""A plan for people: the answer first, then where every gigabyte and millisecond goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from trigrid.plan.figures import TOKENS, memory_wall
from trigrid.plan.goodput import goodput
from trigrid.plan.plan import DOES_NOT_FIT, TIGHT, Plan, Stage, number_format, step_for
from trigrid.plan.software import Policy
from trigrid.report.console import duration, table
from trigrid.report.units import days, figures, gib, scaled, seconds
from trigrid.spec.cluster import Tier

WIDTH = 100
MOST_STAGES = 10
"""Stages shown; of more the first, the last and the fullest."""
PART_NAMES = {
    "compute": "compute",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "ep": "expert parallel, exposed",
    "zero": "ZeRO per use, exposed",
    "p2p": "stage boundaries",
    "idle": "idle pipeline",
    "reduce": "gradients reduced, exposed",
    "gather": "weights gathered, exposed",
    "tied": "tied embedding",
    "optimizer": "optimizer",
    "jitter": "slowest rank (jitter)",
    "fixed": "fixed",
}
AXIS_OF_PART = {"reduce": "zero", "gather": "zero", "p2p": "pp", "tied": "pp"}
SMALL = 0.0005


def verdict(plan: Plan) -> str:
    """SAFE, TIGHT or DOES NOT FIT, by the stage that is worst."""
    found = {stage.verdict for stage in plan.stages}
    return next((v for v in (DOES_NOT_FIT, TIGHT) if v in found), "SAFE")


def plan_text(plan: Plan, tokens: float = TOKENS, head: Sequence[str] = ()) -> str:
    """The plan on a page; head: lines that stand before the details."""
    blocks = [
        [title(plan), *_rows(answer_rows(plan, tokens))],
        list(head),
        _rows([("memory wall", wall_text(plan))]),
        _rows(grid_rows(plan)),
        _memory(plan),
        _time(plan),
        _warnings(plan),
        _assumptions(plan),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def short_text(plan: Plan) -> str:
    """The plan in two lines, as a training run prints them before it starts."""
    full, peak = gib(plan.fullest.memory.total_bytes), gib(plan.ceiling_bytes)
    return (
        f"plan: {headline(plan)}: stage {plan.fullest.stage} needs {full} of {peak} GiB\n"
        f"plan: step {seconds(plan.step_s.best)} ({_range(plan)}), {figures(plan.tokens_per_s_per_gpu)} tokens/s per "
        f"GPU, MFU {plan.mfu_full_attention:.1%} (full attention), idle share {plan.time.idle_share:.1%}"
    )


def headline(plan: Plan) -> str:
    """Whether it fits, and by how much not."""
    word = verdict(plan)
    if word == DOES_NOT_FIT:
        over = gib(plan.fullest.memory.total_bytes - plan.ceiling_bytes)
        return f"DOES NOT FIT, by {over} GiB on stage {plan.fullest.stage}"
    return f"FITS, {word}" if word != TIGHT else "FITS, TIGHT (within the margin)"


def _range(plan: Plan) -> str:
    unit = 1.0 if plan.step_s.best >= 0.9995 else 1e3
    return f"{figures(plan.step_s.low * unit)} – {figures(plan.step_s.high * unit)}"


def _rows(pairs: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in pairs)
    lines: list[str] = []
    for name, text in pairs:
        first, *rest = wrap(text, WIDTH - width - 4, break_on_hyphens=False) or [""]
        lines.append(f"  {name:{width}}  {first}")
        lines += [f"  {'':{width}}  {line}" for line in rest]
    return lines


def title(plan: Plan) -> str:
    """What is planned, and whether it fits."""
    model = f"{plan.job.model.name} ({scaled(plan.parameters)} parameters)"
    return f"{model} on {plan.setup.world:,} × {plan.machine.gpu.name}: {headline(plan)}"


def answer_rows(plan: Plan, tokens: float) -> list[tuple[str, str]]:
    """Step, throughput, MFU, training and goodput in words."""
    trained = plan.training(tokens)
    cost = f", cost {trained.cost:,.0f}" if trained.cost is not None else ""
    kept = goodput(plan.setup.world)
    energy = f"{trained.energy_kwh / 1e6:,.2f} GWh" if trained.energy_kwh >= 1e5 else f"{trained.energy_kwh:,.0f} kWh"
    return [
        ("step", f"{seconds(plan.step_s.best)}  ({_range(plan)})"),
        (
            "throughput",
            f"{figures(plan.tokens_per_s_per_gpu)} tokens/s per GPU, {scaled(plan.tokens_per_s)} tokens/s in all",
        ),
        ("MFU", f"{plan.mfu_full_attention:.1%} counting full attention, {plan.mfu_causal:.1%} its causal half"),
        (f"{scaled(tokens)} tokens", f"{days(trained.seconds)}, {energy}{cost}, if every step counts"),
        (
            "goodput",
            f"{kept.productive_share:.1%}, at one unexpected stop in {duration(kept.mtbf_job_s)} (Llama 3's rate) and "
            f"a checkpoint every {duration(kept.interval_s)}",
        ),
    ]


def wall_text(plan: Plan) -> str:
    """The whole model's state against one server."""
    wall = memory_wall(plan)
    needed, server, over = (wall[key] / 1e9 for key in ("state_bytes", "server_bytes", "deficit_bytes"))
    node = plan.machine.gpus_per_node
    text = (
        f"{policy_text(plan.software.policy)}: {figures(needed)} GB of state against {figures(server)} GB on one "
        f"server of {node} GPUs"
    )
    return text + (f": {figures(over)} GB too much" if over > 0 else ": it fits on one, without activations")


def policy_text(policy: Policy) -> str:
    """A precision policy in words."""
    parts = (("weights", policy.weights), ("master", policy.master), ("gradients", policy.gradients))
    named = ", ".join(f"{name} {size}" for name, size in (*parts, ("moments", policy.moments)) if size)
    return f"{policy.total} bytes per parameter (policy {policy.name}: {named})"


def grid_rows(plan: Plan) -> list[tuple[str, str]]:
    """Grid, layout and batch in words."""
    setup = plan.setup
    degrees = [("TP", setup.tp), ("PP", setup.pp), ("CP", setup.cp), ("DP", setup.dp)]
    shape = " × ".join(f"{name} {size}" for name, size in degrees if size > 1 or name != "CP")
    if setup.ep > 1:
        shape += f", EP {setup.ep} inside DP"
    if setup.dp_replicate > 1:
        shape += f", {setup.dp_replicate} copies of {setup.shards} shards (HSDP)"
    crossed = ", ".join(f"{axis.upper()} over {tier}" for axis, tier in tiers(plan).items() if axis != "zero")
    policy = f"ZeRO-{setup.zero}"
    if setup.zero == 3:
        policy += ", weights gathered for each use" if setup.gather_per_use else ", weights gathered once a step"
    if setup.reduce_per_microbatch != (setup.zero >= 2):
        policy += ", gradients reduced " + ("per microbatch" if setup.reduce_per_microbatch else "once a step")
    virtual = f", {setup.virtual} stages a rank" if setup.virtual > 1 else ""
    pipeline = f"{setup.schedule}{virtual}, " if setup.pp > 1 else ""
    batch = plan.job.batch
    return [
        ("grid", f"{shape} = {setup.world:,} GPUs" + (f"; {crossed}" if crossed else "")),
        ("layout", f"{policy}; {pipeline}recomputation {setup.recompute_text}; software {plan.software.name}"),
        (
            "batch",
            f"{batch.global_batch:,} sequences of {batch.sequence:,} tokens = dp {setup.dp} × micro-batch "
            f"{setup.micro_batch} × {setup.microbatches} microbatches",
        ),
    ]


def tiers(plan: Plan) -> dict[str, str]:
    """The network that each axis crosses, and that shards do, in words; axes of one rank are left out."""
    job = plan.job
    groups = step_for(job.model, job.cluster, plan.software, number_format(job)).groups(plan.setup)
    tiers = {
        "tp": groups.tp.tier,
        "cp": groups.cp.tier,
        "pp": groups.neighbours,
        "ep": groups.ep.tier,
        "dp": groups.batch.tier if job.parallel.dp > 1 else Tier.LOCAL,
        "zero": groups.zero.tier,
    }
    words = {Tier.NVLINK: "NVLink", Tier.LEAF: "the leaf", Tier.SPINE: "the spine"}
    return {axis: words[tier] for axis, tier in tiers.items() if tier in words}


COLUMNS = {
    "weights": ("weights",),
    "grads": ("gradients",),
    "optim.": ("master", "optimizer"),
    "activ.": ("activations",),
    "logits": ("logits",),
    "work": ("transients", "buffers", "workspace"),
    "alloc.": ("allocator",),
    "runtime": ("runtime",),
}
MOMENTS = {
    "loss": "when backward begins with the loss",
    "block": "in the backward of its newest block",
    "embedding": "at its embedding",
    "reduce": "in its last backward, beside gradients that are reduced",
    "optimizer": "in the optimizer's update",
    "start": "when its state is made",
}


def fullest_text(stage: Stage) -> str:
    """What the fullest stage holds, by the three meters."""
    memory = stage.memory
    return (
        f"stage {stage.stage} is fullest, {MOMENTS[memory.use.moment]}: {gib(memory.allocated_bytes)} allocated, "
        f"{gib(memory.reserved_bytes)} reserved, {gib(memory.total_bytes)} on the device; not modelled and not hidden: "
        f"± {gib(stage.margin_bytes)}"
    )


def _memory(plan: Plan) -> list[str]:
    shown = _shown_stages(plan)
    rows = [
        [
            str(stage.stage),
            str(stage.layers),
            *(gib(sum(stage.memory.ledger[name] for name in names)) for names in COLUMNS.values()),
            gib(stage.memory.total_bytes),
            stage.verdict,
        ]
        for stage in shown
    ]
    left = len(plan.stages) - len(shown)
    lines = table(["stage", "layers", *COLUMNS, "total", ""], rows).splitlines()
    if left:
        lines.append(f"{left} more stages need no more than the fullest")
    lines += wrap(fullest_text(plan.fullest), WIDTH - 2)
    return [f"  memory per GPU in GiB, ceiling {gib(plan.ceiling_bytes)}", *(f"  {line.rstrip()}" for line in lines)]


def _shown_stages(plan: Plan) -> list[Stage]:
    if len(plan.stages) <= MOST_STAGES:
        return list(plan.stages)
    last = len(plan.stages) - 1
    wanted = sorted({0, 1, last - 1, last, plan.fullest.stage})
    return [plan.stages[stage] for stage in wanted]


def _time(plan: Plan) -> list[str]:
    time, crossed = plan.time, tiers(plan)
    rows = []
    for name, spent in time.parts_s.items():
        if spent / time.step_s < SMALL:
            continue
        link = time.links_s.get(name)
        tier = crossed.get(AXIS_OF_PART.get(name, name), "the wire")
        wires = f"of {seconds(link)} on {tier}" if link else ""
        rows.append((PART_NAMES[name], seconds(spent), f"{spent / time.step_s:6.1%}", wires))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        f"    {name:{widths[0]}}  {spent:>{widths[1]}}  {share:>{widths[2]}}  {wires}".rstrip()
        for name, spent, share, wires in rows
    ]
    first = (
        f"  step of {seconds(time.step_s)}; bubble_ratio {time.bubble_ratio:.3f} (idle ÷ busy), "
        f"idle_share {time.idle_share:.3f} (idle ÷ pipeline)"
    )
    traffic = ", ".join(f"{axis} {amount / 1e9:,.1f}" for axis, amount in plan.traffic_bytes.items())
    sent = [f"  traffic of one GPU in a step, GB: {traffic}"] if traffic else []
    return [first, *lines, *sent]


def _warnings(plan: Plan) -> list[str]:
    lines: list[str] = []
    for note in plan.warnings:
        lines += wrap(f"warning: {note.message} [{note.code}]", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _assumptions(plan: Plan) -> list[str]:
    first, *others = _wrapped(plan.assumptions)
    return [f"  assumed: {first}", *(f"           {line}" for line in others)]


def _wrapped(sentences: Sequence[str]) -> Iterator[str]:
    for sentence in sentences:
        yield from wrap(sentence, WIDTH - 11, break_on_hyphens=False)
