"""How large a question may be, so that every answer comes at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trigrid.errors import Problem
from trigrid.job.sources import shown
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
CLUSTER = (
    ("nic_gbit", 1e-3, 1e6),
    ("nvlink_gb_s", 1e-3, 1e6),
    ("oversubscription", 1.0, 1e6),
    ("power_w", 1e-3, 1e6),
    ("price", 1e-6, 1e6),
)
"""Least, where it is not 0, and most: far beyond them a step has no finite time or cost."""
MOST_TOKENS = 1e24
MOST_VALUES, LONGEST_KEY, LONGEST_ARRAY = 160, 64, 1024
"""Of a state: keys, characters of a key, and elements of a value; every job key and every stage has room."""
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
    for name, low, high in CLUSTER:
        value = getattr(job.cluster, name)
        if value and not low <= value <= high:
            reason = f"this page plans from {low:g} to {high:,.0f}"
            yield Problem(f"cluster.{name}", value, reason, (low if value < low else high,))
    if job.model.experts and job.model.experts.count > 4096:
        reason = f"is more than this page plans; {COMMAND}"
        yield Problem("model.experts.count", job.model.experts.count, reason, (4096,))
    if (done := actions(job)) > MOST_ACTIONS:
        reason = f"{job.parallel.stages:,} stages do {done:,} actions a step, and this page replays {MOST_ACTIONS:,}"
        yield Problem("parallel.pp", job.parallel.pp, f"{reason}; {COMMAND}")
    elif job.parallel.schedule == "auto" and (done := spans(job)) > MOST_MADE:
        reason = f"making a schedule of {done:,} actions takes longer than this page waits; {COMMAND}"
        yield Problem("parallel.schedule", "auto", reason, ("1f1b", "interleaved"))


def too_long(values: Mapping[str, object]) -> Iterator[Problem]:
    """Why the values of a state are too many or too long to be looked at."""
    if len(values) > MOST_VALUES:
        yield Problem("values", f"{len(values):,} keys", f"are more than {MOST_VALUES}")
        return
    for key, value in values.items():
        if len(key) > LONGEST_KEY:
            yield Problem(key, shown(value), f"no key has more than {LONGEST_KEY} characters")
        elif isinstance(value, list) and len(value) > LONGEST_ARRAY:
            yield Problem(key, f"{len(value):,} elements", f"are more than {LONGEST_ARRAY:,}")


def spans(job: Job) -> int:
    """Forwards and backwards of a step of one pipeline."""
    return 2 * job.parallel.stages * max(1, job.batch.microbatches(job.parallel))


def actions(job: Job) -> int:
    """Forwards and backwards that a plan replays or counts: those of many rounds are known from fewer."""
    m = max(1, job.batch.microbatches(job.parallel))
    played = m if job.parallel.schedule == "gpipe" else min(m, ROUNDS * job.parallel.pp)
    return 2 * job.parallel.stages * played if job.parallel.pp > 1 else 2
