"""A recorded step beside the planned one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.jobs import named, small_job

from trigrid.errors import Refused
from trigrid.plan.scheduled import job_schedule
from trigrid.plan.simulate import Simulation, simulate
from trigrid.report.timelines import compare, comparison_json, comparison_text
from trigrid.report.trace import Trace, TraceSpan, write_trace
from trigrid.schedule import Durations, order_of, replay
from trigrid.schedule.recorded import read_recorded, times_of
from trigrid.spec.job import Job

RUN = Durations.equal(4, 1.0, 1.5, 0.5, p2p_s=0.25)


def job() -> Job:
    return replace(small_job(named("pp2dp2", schedule="interleaved", virtual_stages=2)), run=small_job(named("")).run)


def recorded(folder: Path, run_of: Job, late_s: float = 0.0, without: str = "") -> Path:
    """A run of `run_of` on two pipelines, the second late by so much, as `train --trace` would have written it."""
    timeline = replay(order_of(job_schedule(run_of)), RUN)
    spans = [
        TraceSpan(2 * dp + rank, "compute", str(kind), stage, m, 10 + start + dp * late_s, 10 + end + dp * late_s)
        for dp in (0, 1)
        for rank, (kind, stage, m), start, end in timeline.spans
        if f"{kind}{stage}.{m}" != without
    ]
    spans.append(TraceSpan(0, "compute", "update", None, None, 40.0, 41.0))
    write_trace(Trace(spans, [], {rank: f"rank {rank}" for rank in range(4)}, {"step": 7}), folder / "trace.json")
    return folder


@pytest.fixture
def planned() -> Simulation:
    return simulate(job())


def test_durations_are_read_back(tmp_path: Path) -> None:
    found = read_recorded(recorded(tmp_path, job()))
    assert (found.step, found.step_s, len(found.pipelines)) == (7, 41.0, 2)
    times = times_of(found, job_schedule(job()))
    assert times.durations.forward_s == pytest.approx(RUN.forward_s)
    assert times.durations.backward_s == pytest.approx(RUN.backward_s)
    assert times.durations.p2p_s == pytest.approx(RUN.p2p_s)
    assert not times.halved


def test_a_run_without_surprises_is_what_its_durations_give(tmp_path: Path, planned: Simulation) -> None:
    found = compare(planned, recorded(tmp_path, job(), late_s=0.5))
    assert found.replayed.step_s == pytest.approx(replay(order_of(job_schedule(job())), RUN).step_s)
    for measured in found.measured:
        assert measured.step_s == pytest.approx(found.replayed.step_s)
        assert measured.busy_s == pytest.approx(found.replayed.busy_s)
    told = comparison_json(found)
    assert told["step"] == 7
    assert len(told["pipelines_s"]) == 2
    assert told["measured"]["idle_share"] == pytest.approx(told["replayed"]["idle_share"])
    assert told["planned"]["pipeline_s"] == planned.timeline.step_s
    json.dumps(told, allow_nan=False)
    text = comparison_text(found, 100)
    assert "measured, step 7 of the run" in text
    assert "+0.0% of what was measured" in text.replace("\n", " ")


def test_another_schedule_or_batch_is_refused(tmp_path: Path, planned: Simulation) -> None:
    other = replace(job(), parallel=replace(job().parallel, schedule="zbv"))
    with pytest.raises(Refused, match=r"only the run has it|only the job's schedule has it|has no forward"):
        compare(planned, recorded(tmp_path, other))
    with pytest.raises(Refused, match=r"B1\.1: only the job's schedule has it"):
        compare(planned, recorded(tmp_path, job(), without="B1.1"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory; `trigrid train JOB --trace STEP` writes it"),
        ("", "is no trace of a training step"),
        ("[1]", "is no trace of a training step"),
        ('{"otherData": {"step": 1}, "traceEvents": []}', "has no action of a pipeline"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "trace.json").write_text(text)
    with pytest.raises(Refused) as refused:
        read_recorded(tmp_path)
    assert str(refused.value) == f"run = {tmp_path / 'trace.json'}: {message}"
