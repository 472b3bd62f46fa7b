"""The plan of a job, before it is started on GPUs."""

from __future__ import annotations

import torch

from trigrid.errors import Problem, Refused
from trigrid.plan.plan import make_plan
from trigrid.report.console import Console
from trigrid.report.plan import short_text
from trigrid.spec.job import Job

GIB = 2**30


def check_plan(job: Job, console: Console, ignore: bool) -> None:
    """Say what the planner expects of `job`, where it will run on GPUs.

    Raises Refused where its fullest stage does not fit in the memory of this node's first GPU, unless `ignore`.
    """
    if job.run.device == "cpu" or not torch.cuda.is_available():
        return
    plan = make_plan(job)
    console.say(short_text(plan))
    room_bytes, needed_bytes = torch.cuda.get_device_properties(0).total_memory, plan.fullest.memory.total_bytes
    if needed_bytes <= room_bytes:
        return
    reason = (
        f"stage {plan.fullest.stage} needs about {needed_bytes / GIB:.1f} GiB, and a GPU here has "
        f"{room_bytes / GIB:.1f}: `trigrid plan` shows what would fit"
    )
    if not ignore:
        raise Refused([Problem("--ignore-plan", "(not given)", reason)])
    console.warn(reason)
