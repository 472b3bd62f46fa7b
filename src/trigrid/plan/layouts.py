"""From the plain numbers of a candidate to a job, and from what is given of a layout to a sound one."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from trigrid.plan.setup import Setup
from trigrid.spec.job import Job
from trigrid.spec.layout import V_SHAPED, Layout, RecomputeName, ScheduleName, ZeroStage, zero_policy


def job_of(job: Job, setup: Setup) -> Job:
    """`job` in the layout and the batch of `setup`."""
    zero = cast(ZeroStage, setup.zero)
    layout = replace(
        job.parallel,
        tp=setup.tp,
        cp=setup.cp,
        pp=setup.pp,
        dp=setup.dp,
        ep=setup.ep,
        dp_replicate=setup.dp_replicate,
        zero=zero,
        gather="auto",
        reduce="auto",
        schedule=cast(ScheduleName, setup.schedule),
        virtual_stages=setup.virtual,
        recompute=cast(RecomputeName | tuple[RecomputeName, ...], setup.recompute),
        sequence_parallel=setup.sequence_parallel,
        stage_layers=setup.stage_layers,
    )
    implied = zero_policy(layout)
    if implied.gather_per_use != setup.gather_per_use:
        layout = replace(layout, gather="per_use" if setup.gather_per_use else "per_step")
    if implied.reduce_per_microbatch != setup.reduce_per_microbatch:
        layout = replace(layout, reduce="per_microbatch" if setup.reduce_per_microbatch else "per_step")
    batch = replace(
        job.batch,
        micro_batch=setup.micro_batch,
        global_batch=setup.dp * setup.micro_batch * setup.microbatches,
        sequence=setup.sequence,
    )
    return replace(job, parallel=layout, batch=batch)


def neutral(layout: Layout, given: frozenset[str]) -> Layout:
    """`layout` with the smallest values of what is not `given` that go with what is: a sound base for a search."""
    changes: dict[str, object] = {}
    if "schedule" not in given and layout.virtual_stages > 1:
        changes["schedule"] = "interleaved"
    if "virtual_stages" not in given and layout.schedule in V_SHAPED:
        changes["virtual_stages"] = 2
    piped = "virtual_stages" in changes or layout.virtual_stages > 1
    if "pp" not in given:
        named = 0 if isinstance(layout.recompute, str) else len(layout.recompute)
        stages = max(len(layout.stage_layers), named)
        chunks = int(cast(int, changes.get("virtual_stages", layout.virtual_stages)))
        changes["pp"] = max(1 + piped, stages // chunks)
    if "zero" not in given and layout.gather == "per_use":
        changes["zero"] = 3
    if "dp" not in given:
        changes["dp"] = max(layout.dp_replicate, layout.ep)
    return replace(layout, **changes)  # type: ignore[arg-type]
