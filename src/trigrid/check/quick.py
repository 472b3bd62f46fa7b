"""A smaller job that runs the same program: what a proof needs when minutes count."""

from __future__ import annotations

from dataclasses import replace

from trigrid.errors import Refused
from trigrid.spec.job import Job
from trigrid.spec.rules import check, check_trainable


def quick(job: Job) -> tuple[Job, str]:
    """`job` with one layer in each stage and two microbatches for each pipeline rank, at most, and what was cut in
    words, "" if nothing was. Ranks, groups, schedule and shapes of layers stay; a schedule of a file keeps its
    microbatches. Raises Refused where a key speaks of what was cut away, such as a pattern of `optimizer.frozen`."""
    layout, batch = job.parallel, job.batch
    layers = min(job.model.layers, layout.pp * layout.virtual_stages)
    microbatches = batch.microbatches(layout)
    few = microbatches if layout.schedule_file else min(microbatches, 2 * layout.pp)
    cut = [
        f"{kept} of {all_} {what}"
        for kept, all_, what in ((layers, job.model.layers, "layers"), (few, microbatches, "microbatches"))
        if kept < all_
    ]
    small = replace(
        job,
        model=replace(job.model, layers=layers),
        batch=replace(batch, global_batch=batch.global_batch // microbatches * few),
        parallel=replace(layout, stage_layers=() if layers < job.model.layers else layout.stage_layers),
    )
    if problems := [*check(small), *check_trainable(small)]:
        raise Refused(problems)
    return small, ", ".join(cut)
