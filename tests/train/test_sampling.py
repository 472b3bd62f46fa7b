"""What steps of a run leave for `trigrid compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.in_process import quick, train
from helpers.jobs import named, small_job
from helpers.runs import metrics, run, run_dir, write_job
from helpers.samples_of import sampled_steps

from trigrid.check.pool import Pool
from trigrid.engine.comm import Comm
from trigrid.engine.recorder import COMPUTE, WAIT, Span
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.report.samples import PARTS, planned_counts, read_samples
from trigrid.train.sampling import Sampler, parts_of, slowest_of


def span(stream: str, kind: str, start_s: float, stop_s: float, stage: int | None = None) -> Span:
    return Span(stream, kind, stage, 0 if stage is not None else None, start_s, stop_s)


def test_every_second_has_one_part() -> None:
    spans = [
        span(WAIT, "world", 0.1, 0.3),
        span(WAIT, "pp", 0.5, 1.0),
        span(COMPUTE, "F", 1.0, 3.0, 0),
        span(WAIT, "tp", 1.5, 2.0),
        span(WAIT, "kv", 2.5, 2.6),
        span(WAIT, "pp", 3.0, 3.25),
        span(COMPUTE, "B", 3.5, 6.0, 0),
        span(WAIT, "zero", 4.0, 5.0),
        span("tp", "all_reduce", 1.4, 2.0),
        span(COMPUTE, "sum gradients", 6.0, 8.0),
        span(WAIT, "zero", 6.0, 6.5),
        span(WAIT, "replicate", 6.5, 7.0),
        span(WAIT, "tied", 7.0, 7.5),
        span(COMPUTE, "update", 8.0, 10.0),
        span(WAIT, "world", 8.0, 8.25),
        span(WAIT, "zero", 9.0, 9.5),
    ]
    parts = parts_of(spans, 10.5, 0.05)
    assert parts == pytest.approx(
        {
            "compute": 2.0 - 0.6 + 2.5 - 1.0,
            "tp": 0.6,
            "zero": 1.0,
            "pipeline": 0.75,
            "reduce": 1.0,
            "gather": 0.5,
            "tied": 0.5,
            "optimizer": 2.0 - 1.5 + 2.0 - 0.75,
            "others": 0.45,
            "data": 0.05,
            "other": 0.1 + 0.2 + 0.25 + 0.5 - 0.05,
        },
        abs=1e-9,
    )
    assert sum(parts.values()) == pytest.approx(10.5)


def test_the_slowest_is_so_among_its_own() -> None:
    """R93: stages have different work."""
    slow = slowest_of([1.0, 1.2, 5.0, 5.1], [0, 0, 1, 1])
    assert slow == pytest.approx((1, 1.2, 1.0))
    assert slowest_of([1.0, 5.0], [0, 1]) is None
    assert slowest_of([], []) is None


def test_samples_grow_rare(tmp_path: Path) -> None:
    """Half a hundred in a million steps that were of one length, and then one in a thousand."""
    job = small_job(named("", zero=0))
    engine = build_engine(job, Comm(grid_of(job), 0), torch.device("cpu"))
    sampler = Sampler(engine, tmp_path, 0, "cpu", 1, 0)
    taken = [n for n in range(1, 20_001) if sampler.begin(may=True)]
    assert taken[:12] == [2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22]
    assert [b - a for a, b in zip(taken[-3:], taken[-2:], strict=False)] == [1000, 1000]
    assert len(taken) < 60
    assert sampler.begin(may=False) is False


def test_a_run_leaves_samples_of_each_start(tmp_path: Path) -> None:
    """One process, twice: what is counted is what was planned, and each sample's parts are its step."""
    job = write_job(tmp_path)
    train(job, *quick(4))
    folder = run_dir(job)
    train(job, *quick(7), resume=folder)
    first, again = read_samples(folder)
    assert (first.done, again.done) == (0, 4)
    assert [sample.step for sample in first.samples] == [2, 3, 4]
    assert [sample.step for sample in again.samples] == [6, 7]
    assert first.stop_s == again.begin_s
    assert first.device == "cpu"
    steps = {entry["step"]: entry["step_s"] for entry in metrics(folder, "step")}
    for life in (first, again):
        assert life.unlike == ()
        assert life.counted[0].numbers == planned_counts(life.job, 0)
        for sample in life.samples:
            (parts,), (peaks,) = sample.parts_s, sample.peaks
            assert sum(parts.values()) == pytest.approx(sample.step_s)
            assert sample.step_s >= steps[sample.step]
            assert parts["compute"] > 0
            assert min(parts.values()) >= -1e-6
            assert all(parts[name] == 0 for name in ("tp", "zero", "pipeline", "reduce", "gather", "tied"))
            assert peaks["resident"] > peaks["grown"] >= 0
            assert (peaks["allocated"], peaks["reserved"], peaks["device"]) == (0, 0, 0)


def test_a_step_that_changes_nothing_is_no_sample(tmp_path: Path) -> None:
    """Its gradient was not finite."""
    job = small_job(named("", zero=0))
    engine = build_engine(job, Comm(grid_of(job), 0), torch.device("cpu"))
    sampler = Sampler(engine, tmp_path, 0, "cpu", 1, 0)
    for step in (1, 2):
        if sampler.begin(may=True):
            sampler.end(step, 0.0, updated=False)
    assert engine.comm.recorder is None
    (life,) = read_samples(tmp_path)
    assert life.samples == ()
    assert life.counted == ()


def test_a_step_that_is_traced_is_no_sample(tmp_path: Path) -> None:
    """A traced one has every moment of its memory read."""
    job = write_job(tmp_path)
    train(job, *quick(4), "--trace", "3")
    (life,) = read_samples(run_dir(job))
    assert [sample.step for sample in life.samples] == [2, 4]
    assert (run_dir(job) / "trace.json").exists()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


LAYOUTS = (
    ("tp2pp2", {"zero": 1}),
    ("pp2dp2", {"zero": 3, "schedule": "zb-h1"}),
    ("tp2dp2", {"zero": 2, "recompute": "full", "sequence_parallel": True}),
)


@pytest.mark.parametrize(("name", "options"), LAYOUTS)
def test_every_rank_counts_what_was_planned(name: str, options: dict[str, object], pool: Pool, tmp_path: Path) -> None:
    """R84: state and traffic, to the byte; in what is waited for, every axis that the layout has appears."""
    job = small_job(named(name, **options), precision="bf16")
    pool.run(sampled_steps, 4, job, str(tmp_path), {})
    (life,) = read_samples(tmp_path)
    assert life.unlike == ()
    assert life.unlike_ranks == 0
    assert len(life.counted) == job.parallel.pp
    for stage, counted in enumerate(life.counted):
        assert grid_of(job).coord(counted.rank).pp == stage
        assert counted.numbers == {
            k: v for k, v in planned_counts(job, counted.rank).items() if v or k in counted.numbers
        }
    waited = {part for sample in life.samples for stage in sample.parts_s for part in PARTS if stage[part] > 0}
    assert {"compute", "optimizer", "others", "other"} <= waited
    assert ("tp" in waited) == (job.parallel.tp > 1)
    assert ("pipeline" in waited) == (job.parallel.pp > 1)
    assert ("zero" in waited) == (job.parallel.zero > 1)
    assert ("reduce" in waited) == (job.parallel.zero > 0 and job.parallel.dp > 1)


def test_what_is_planted_is_named(pool: Pool, tmp_path: Path) -> None:
    """All ranks sum once more than they should, and rank 1 is slow."""
    job = small_job(named("dp4", zero=2), precision="fp32")
    pool.run(sampled_steps, 4, job, str(tmp_path), {"more": 1, "slow": 1})
    (life,) = read_samples(tmp_path)
    assert life.unlike_ranks == 4
    assert any(line.startswith("rank 2: world all_reduce calls 3, planned 2") for line in life.unlike)
    late = Counter(sample.slowest.rank for sample in life.samples if sample.slowest)
    assert late.most_common(1)[0][0] == 1


def test_a_run_of_four_says_how_it_compares(tmp_path: Path) -> None:
    """The last lines that a person sees, from the ranks themselves."""
    job = write_job(tmp_path)
    code, out, err = run("train", job, "--tp", "2", "--pp", "2", "--quiet")
    assert code == 0, err
    lines = out.splitlines()
    assert any(line.startswith("a step: ") for line in lines)
    assert "State and traffic are as planned, to the byte, on all 4 ranks." in out
    assert lines[-1] == f"more: trigrid compare {run_dir(job)}"
    code, out, err = run("compare", run_dir(job))
    assert code == 0, err
    assert "TP 2 × PP 2 × DP 1, ZeRO-1, 1f1b on 4 × cpu" in out
    assert "as planned, calls and bytes" in out
    assert err == ""
