"""Facts and a job for tests of what a run tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.jobs import small_job
from trigrid.report.metrics import Facts
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout

FACTS = Facts(
    trigrid="0",
    world=4,
    device="cpu",
    precision="fp32",
    parameters=1000,
    steps=60,
    tokens_per_step=2048,
    flops_per_token_full=1e6,
    flops_per_token_causal=0.8e6,
    matmul_flops_per_s=8e9,
    data="d0",
)


def told_to(*trackers: str, **run: Any) -> Job:
    """A job with these trackers."""
    job = small_job(Layout())
    return replace(job, run=replace(job.run, trackers=trackers, **run))
