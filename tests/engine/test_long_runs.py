"""Hundreds of steps hold no more than a few."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.jobs import named, small_job
from helpers.long_runs import Held, Leak, hold_a_file, hold_a_graph, hold_a_group, hold_a_tensor, run_on

from trigrid.check.pool import Pool
from trigrid.spec.job import Job

LENGTHS = (16, 8, 12)
# Python's own tables grow now and then, the less the longer a run is; the smallest tensor takes twice as much.
HEAP_SLACK_BYTES_PER_STEP = 256


def job_of(name: str, **fields: object) -> Job:
    job = small_job(named(name, **fields), hidden=16, layers=1, ffn=16, tied=True)
    return replace(job, batch=replace(job.batch, global_batch=2 * job.parallel.dp, micro_batch=1))


def grown(found: list[Held], steps: int) -> set[str]:
    """What is more after the last step than after the first fifth of them; of the heap, than after three
    fifths."""
    first, middle, last = found[0], found[2], found[4]
    names = {name for name in Held._fields[:-1] if getattr(last, name) > getattr(first, name)}
    slack = HEAP_SLACK_BYTES_PER_STEP * steps * 2 // 5
    return names | ({"heap_bytes"} if last.heap_bytes - middle.heap_bytes > slack else set())


@pytest.mark.parametrize(
    ("name", "fields"),
    [("pp2dp2", {"zero": 3, "prefetch": 2}), ("tp2", {"zero": 1, "sequence_parallel": True, "recompute": "full"})],
    ids=str,
)
def test_400_steps(pool: Pool, name: str, fields: dict[str, object]) -> None:
    """R44: storages, open files, groups, threads and the heap, with validations and changing lengths of sequences."""
    job = job_of(name, **fields)
    for found in pool.run(run_on, job.parallel.world, job, 400, LENGTHS):
        assert not grown(found, 400), found


@pytest.mark.parametrize(
    ("leak", "what"),
    [
        (hold_a_tensor, "storages"),
        (hold_a_graph, "heap_bytes"),
        (hold_a_group, "groups"),
        (hold_a_file, "descriptors"),
    ],
)
def test_a_leak_would_be_seen(pool: Pool, leak: Leak, what: str) -> None:
    """R44: of each kind, planted."""
    job = job_of("dp2", zero=1)
    for found in pool.run(run_on, 2, job, 50, LENGTHS, leak):
        assert what in grown(found, 50)
