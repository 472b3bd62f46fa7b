"""How large a question may be, so that every answer comes at once."""

from __future__ import annotations

from collections.abc import Iterator

from trigrid.errors import Problem
from trigrid.spec.job import Job

COMMAND = "`trigrid plan` on the command line has no such limit"
LARGEST = (
    ("model", "layers", 1024),
    ("model", "heads", 4096),
    ("model", "hidden", 2**20),
    ("model", "vocab", 2**24),
    ("batch", "global_batch", 2**20),
    ("batch", "sequence", 2**24),
)
ROUNDS = 16
"""Rounds of p microbatches from which on a schedule is replayed by fewer (schedule/steady.py)."""
MOST_ACTIONS = 70_000
"""Of a schedule that is replayed."""
MOST_MADE = 1_200
"""Of a schedule that is made for the stages (`schedule = "auto"`)."""
MOST_SPANS = 40_000
"""Of a timeline that is drawn."""


def too_large(job: Job) -> Iterator[Problem]:
    """Why `job`, each of whose fields is sound, is too much for the page."""
    for table, name, most in LARGEST:
        value = getattr(getattr(job, table), name)
        if value > most:
            yield Problem(f"{table}.{name}", value, f"is more than this page plans; {COMMAND}", (most,))
    if job.model.experts and job.model.experts.count > 4096:
        reason = f"is more than this page plans; {COMMAND}"
        yield Problem("model.experts.count", job.model.experts.count, reason, (4096,))
    if (done := actions(job)) > MOST_ACTIONS:
        reason = f"{job.parallel.stages:,} stages do {done:,} actions a step, and this page replays {MOST_ACTIONS:,}"
        yield Problem("parallel.pp", job.parallel.pp, f"{reason}; {COMMAND}")
    elif job.parallel.schedule == "auto" and (done := spans(job)) > MOST_MADE:
        reason = f"making a schedule of {done:,} actions takes longer than this page waits; {COMMAND}"
        yield Problem("parallel.schedule", "auto", reason, ("1f1b", "interleaved"))


def spans(job: Job) -> int:
    """Forwards and backwards of a step of one pipeline."""
    return 2 * job.parallel.stages * max(1, job.batch.microbatches(job.parallel))


def actions(job: Job) -> int:
    """Forwards and backwards that a plan replays or counts: those of many rounds are known from fewer."""
    m = max(1, job.batch.microbatches(job.parallel))
    played = m if job.parallel.schedule == "gpipe" else min(m, ROUNDS * job.parallel.pp)
    return 2 * job.parallel.stages * played if job.parallel.pp > 1 else 2
