"""`trigrid compare`, as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import named, small_job
from helpers.samples import Folder

from trigrid.cli import app
from trigrid.errors import Refused
from trigrid.plan.measured import Measured, Products
from trigrid.plan.measured_text import measured_text
from trigrid.plan.plan import make_plan
from trigrid.plan.scheduled import job_schedule
from trigrid.report.trace import Trace, TraceSpan, write_trace
from trigrid.schedule import Durations, order_of, replay

ROOT = Path(__file__).parents[1]


def run(*words: object, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard output of `trigrid compare WORDS`, which succeeds."""
    app(["compare", *map(str, words)], exit_on_error=False, print_error=False, result_action="return_value")
    return capsys.readouterr().out


def refusal(*words: object) -> str:
    with pytest.raises(Refused) as refused:
        app(["compare", *map(str, words)], exit_on_error=False, print_error=False)
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "runs" / "small-1", small_job(named("pp2dp2"), precision="bf16"))
    made.start()
    made.trained(9.0, 1.0, 1.5, 2.0)
    made.counted()
    made.sampled({"reduce": 1.0}, peaks={"kept": 9000})
    made.tell("events", "end", step=4)
    return made


def test_a_page(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(folder.path, capsys=capsys)
    lines = text.splitlines()
    assert lines[0] == "small-1: 4 of 10 steps, ended; TP 1 × PP 2 × DP 2, ZeRO-1, 1f1b on 4 × NVIDIA H100 80GB HBM3"
    assert max(map(len, lines)) <= 120
    step = make_plan(folder.job).step_s.best
    assert f"{step * 1e3:.1f} ms" in text
    assert "1.50 s (1.25 – 1.75)" in text
    assert "Largest gap in time: gradients reduced, waited for: 1.00 s" in text
    assert "all 4 ranks" in text
    assert "traced" not in text


def test_it_loads_nothing_heavy(folder: Folder) -> None:
    program = (
        "import sys\nfrom trigrid.cli import app\n"
        f"app(['compare', {str(folder.path)!r}], result_action='return_value')\n"
        "print(*{'torch', 'numpy', 'matplotlib'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("small-1: 4 of 10 steps, ended")
    assert done.stderr.split() == []


def test_a_third_column_is_traced(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """Law 2: predicted = traced = measured, in state."""
    told = json.loads(run(folder.path, "--prove", "--json", "--quiet", capsys=capsys))
    for stage in told["memory"]:
        figures = {figure["name"]: figure for figure in stage["figures"]}
        for name in ("weights", "master", "gradients", "optimizer"):
            assert figures[name]["planned"] == figures[name]["traced"] == figures[name]["measured"] > 0
        assert figures["kept"]["traced"] > 0
        assert figures["allocated"]["traced"] > figures["kept"]["traced"]
    assert "traced" in run(folder.path, "--prove", "--quiet", capsys=capsys)


def test_a_calibration_replaces_the_machine(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"device": "cuda", "accelerator": "NVIDIA H100 80GB HBM3"}
    measured = Measured(about=about, products={"bf16": Products(flops=1e9, half_m=0, half_n=0, half_k=0, error=0)})
    path = tmp_path / "cluster.toml"
    path.write_text(measured_text(measured))
    before, after = (
        json.loads(run(folder.path, "--json", *flags, capsys=capsys)) for flags in ((), ("--calibration", path))
    )
    assert after["same_machine"]
    assert after["step_s"]["planned"]["best"] != before["step_s"]["planned"]["best"]
    assert after["step_s"]["measured"] == before["step_s"]["measured"]


def test_a_recorded_timeline_is_laid_beside_as_well(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(folder.path, "--json", capsys=capsys))["timelines"] is None
    _record(folder)
    text = run(folder.path, capsys=capsys)
    assert "measured, step 3 of the run" in text
    told: dict[str, Any] = json.loads(run(folder.path, "--json", capsys=capsys))["timelines"]
    assert told["step"] == 3
    assert told["measured"]["idle_share"] == pytest.approx(told["replayed"]["idle_share"])


def test_a_timeline_of_another_schedule_is_left_out_and_told(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    _record(folder, "gpipe", microbatches=8)
    app(["compare", str(folder.path)], exit_on_error=False, print_error=False, result_action="return_value")
    out, err = capsys.readouterr()
    assert "its recorded timeline is left out" in err
    assert "measured, step" not in out


def _record(folder: Folder, schedule: str = "1f1b", microbatches: int | None = None) -> None:
    job = replace(folder.job, parallel=replace(folder.job.parallel, schedule=schedule))  # type: ignore[arg-type]
    timeline = replay(order_of(job_schedule(job, microbatches)), Durations.equal(2, 1.0, 1.5, 0.5, p2p_s=0.25))
    spans = [
        TraceSpan(rank, "compute", str(kind), stage, m, start, end)
        for rank, (kind, stage, m), start, end in timeline.spans
    ]
    write_trace(Trace(spans, [], {0: "rank 0", 1: "rank 1"}, {"step": 3}), folder.path / "trace.json")


def test_what_is_no_run_is_refused(folder: Folder, tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "nothing")
    assert f"is no folder of a run: it has no job.toml; nearest legal: {folder.path}" in refusal(tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    assert "is no folder of a run: it has no job.toml" in refusal(tmp_path / "empty")
    assert "is no folder of a run" in refusal(ROOT / "README.md")
    assert "cluster.calibration = no.toml: cannot be read" in refusal(folder.path, "--calibration", "no.toml")
    (folder.path / "samples.jsonl").unlink()
    (folder.path / "job.toml").write_text("[model]\nname = 3\n")
    assert "model.name" in refusal(folder.path)
