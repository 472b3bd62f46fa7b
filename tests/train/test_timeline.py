"""The timeline of a real step, and the rank that holds up the others."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from helpers.jobs import named, small_job
from helpers.runs import run, run_dir, write_job
from helpers.slow import slow_rank

from trigrid.check.pool import Pool
from trigrid.train.meter import busiest


def test_a_step_is_written_as_it_was(tmp_path: Path) -> None:
    """Each action of the schedule once on its rank, in order; every message flows; ZeRO-1's reductions begin before the
    step's last action has ended (R60)."""
    job = write_job(tmp_path)
    layout = ("--pp", "2", "--dp", "2", "--schedule", "zb-h1", "--micro-batch", "1", "--zero", "1")
    code, _, err = run("train", job, "--steps", "3", "--trace", "2", *layout)
    assert code == 0, err
    path = run_dir(job) / "trace.json"
    assert f"timeline of step 2: {path}" in err
    file = json.loads(path.read_text())
    assert file["otherData"]["schedule"] == "zb-h1"
    events = file["traceEvents"]
    for rank in range(4):
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] == "compute"]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(sorted(mine, key=lambda e: e["ts"])))
        actions = [e["name"] for e in mine if e["args"]]
        stage = {0: 0, 1: 1, 2: 0, 3: 1}[rank]
        assert sorted(actions) == sorted(f"{kind}{stage}.{m}" for kind in "FIW" for m in range(4))
        assert {"sum gradients", "update"} <= {e["name"] for e in mine}
        reductions = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["name"] == "reduce_scatter"]
        last = max(e["ts"] + e["dur"] for e in mine if e["args"])
        assert sum(e["ts"] < last for e in reductions) > 1
        assert [e for e in events if e["ph"] == "C" and e["pid"] == rank]
    # Four microbatches, forth and back, on both data-parallel ranks.
    for phase in "sf":
        assert sum(e["ph"] == phase for e in events) == 2 * 2 * 4


def test_a_step_beyond_the_run_is_refused(tmp_path: Path) -> None:
    code, _, err = run("train", write_job(tmp_path), "--trace", "9")
    assert code == 2
    assert "run.trace_step = 9: is after the last step, run.steps = 4; nearest legal: 4, 0" in err


def test_who_sleeps_is_named() -> None:
    """R93: the others wait for it, so they look as slow from outside."""
    with Pool(4) as pool:
        for seen in pool.run(slow_rank, 4, small_job(named("dp4", zero=2)), 2, 0.05):
            assert seen.rank == 2
            assert seen.busy_s > 0.05 * 6 + 0.5 * seen.usual_s


def test_ranks_are_compared_with_those_of_their_stage() -> None:
    assert busiest([1.0, 1.1, 0.9, 3.0, 3.1, 4.5], [0, 0, 0, 1, 1, 1]) is not None
    slow = busiest([1.0, 1.1, 0.9, 3.0, 3.1, 4.5], [0, 0, 0, 1, 1, 1])
    assert slow
    assert (slow.rank, slow.busy_s, slow.usual_s) == (5, 4.5, 3.1)
    assert busiest([1.0, 9.0], [0, 1]) is None
    assert busiest([0.0, 0.0, 0.0], [0, 0, 0]) is None
