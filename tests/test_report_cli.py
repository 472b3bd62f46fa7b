"""`trigrid report`, as a user meets it: of a run, and of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trigrid.cli import app
from trigrid.errors import Refused
from trigrid.plan.goodput import MTBF_GPU_S, best_interval_s

ROOT = Path(__file__).parents[1]
JOB = ROOT / "examples" / "tiny-3d.toml"
LLAMA3 = ROOT / "examples" / "llama3-405b.toml"


def run(*words: object, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard output of `trigrid report WORDS`, which succeeds."""
    app(["report", *map(str, words)], exit_on_error=False, print_error=False, result_action="return_value")
    return capsys.readouterr().out


def reported(*words: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json", capsys=capsys))
    return found


def refusal(*words: object) -> str:
    with pytest.raises(Refused) as refused:
        app(["report", *map(str, words)], exit_on_error=False, print_error=False)
    return str(refused.value)


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    """20 steps of 2 s, a checkpoint every 5, killed once in step 14, gone on after step 10."""
    folder = tmp_path / "runs" / "tiny-1"
    folder.mkdir(parents=True)
    text = JOB.read_text().replace("steps = 90", "steps = 20")
    (folder / "job.toml").write_text(f"{text}\n[checkpoint]\nevery = 5\n")
    clock = 1e9
    lines: dict[str, list[dict[str, Any]]] = {"events": [], "metrics": []}

    def tell(name: str, kind: str, after_s: float, **values: Any) -> None:
        nonlocal clock
        clock += after_s
        lines[name].append({"kind": kind, "time_s": clock, **values})

    for restart, (first, last) in enumerate([(1, 13), (11, 20)]):
        tell("events", "launch", 4.0, world=8, restart=restart)
        tell("events", "start", 10.0, step=first - 1, resumed=restart > 0, checkpoint=None, world=8)
        for step in range(first, last + 1):
            tell("metrics", "step", 2.0 + 3.0 * (step == first), step=step, step_s=2.0 + 3.0 * (step == first))
            if step == first:
                tell("events", "first_step", 0.0, step=step)
            if step % 5 == 0:
                tell("events", "checkpoint_begin", 0.0, step=step)
                tell("events", "checkpoint", 0.5, step=step, seconds=1.5, blocked_s=0.5, bytes=100)
        if not restart:
            tell("events", "failed", 1.5, rank=3, reason="rank 3 was killed", signal="SIGKILL", detected_s=0.5)
    tell("events", "end", 1.0, step=20)
    for name, entries in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return folder


def test_a_run_is_told_by_cause_beside_what_was_expected(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(a_run, capsys=capsys)
    lines = text.splitlines()
    # 20 steps of 2 s; two launches of 10 s, 3 s of excess each; 3 steps and 1 s lost, 0.5 s to detect; 4 checkpoints of
    # 0.5 s; 4 s of waiting; 1 s after the last step.
    assert lines[0] == "tiny-1: 20 of 20 steps, ended; 1m20s in all"
    rows = {line.split()[0]: line.split() for line in reversed(lines) if line.startswith("  ")}
    assert rows["productive"][1:3] == ["40.0", "49.7%"]
    assert rows["redone"][1] == "7.0"
    assert rows["all"][1:3] == ["80.5", "100.0%"]
    words = " ".join(text.split())
    assert "2 launches, 1 failure, 4 complete checkpoints" in words
    assert (
        "steps lost per failure: 3.0 on average, 3 at most; detected after 500 ms on average, 500 ms at most" in words
    )
    assert "rank 3 was killed" in words
    assert "a checkpoint is made every 5 steps (10.0 s); best is one every" in words
    assert "restarted in 15.0 s (measured)" in words
    assert max(map(len, lines)) <= 120


def test_its_json_keeps_its_contract(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = reported(a_run, capsys=capsys)
    assert found["schema"] == "trigrid.report/1"
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], abs=1e-6)
    assert (found["state"], found["steps"], found["launches"], found["rewinds"]) == ("ended", 20, 2, 0)
    assert found["lost_steps"] == {"mean": 3, "max": 3}
    assert found["detected_s"] == {"mean": 0.5, "max": 0.5}
    assert found["failures"][0]["rank"] == 3
    used, best = found["expected"]["used"], found["expected"]["best"]
    assert (used["steps"], used["interval_s"], used["stall_s"], used["write_s"]) == (5, 10.0, 0.5, 1.0)
    mtbf_s = MTBF_GPU_S / 8
    assert used["mtbf_s"] == pytest.approx(mtbf_s)
    assert best["interval_s"] == pytest.approx(best_interval_s(mtbf_s, 0.5, 1.0), abs=1.0)
    assert best["interval_s"] == best["steps"] * 2.0
    assert best["shares"]["productive"] > used["shares"]["productive"]
    assert sum(best["shares"].values()) == pytest.approx(1.0)


def test_what_is_given_goes_before_what_was_measured(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--mtbf-hours", 1, "--restart-s", 100, "--detect-s", 7)
    found = reported(a_run, *flags, capsys=capsys)["expected"]["best"]
    assert (found["mtbf_s"], found["restart_s"], found["detect_s"]) == (3600, 100, 7)


def test_a_run_killed_at_any_line_is_reported(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = (a_run / "events.jsonl").read_bytes()
    for size in range(20, len(events), 173):
        (a_run / "events.jsonl").write_bytes(events[:size])
        if b"\n" in events[:size]:
            found = reported(a_run, capsys=capsys)
            assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], abs=1e-6)
            assert found["state"] != "ended"
    (a_run / "events.jsonl").write_bytes(events[:-20])
    assert "under way, or killed (last line" in run(a_run, capsys=capsys)


def test_what_is_no_run_is_refused(a_run: Path, tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "nothing")
    assert "is no folder of a run: it has no job.toml" in refusal(tmp_path)
    assert f"nearest legal: {a_run}" in refusal(tmp_path / "runs")
    assert "is no folder of a run and no job file" in refusal(ROOT / "README.md")
    (a_run / "events.jsonl").unlink()
    assert "has no events (events.jsonl)" in refusal(a_run)
    assert "need a job file" in refusal(a_run, "--days", 3)
    assert "there is no such file" in refusal(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--days", "0"), "days = 0.0: must be a number above 0"),
        (("--days", "1e6"), "must be 10,000 at most"),
        (("--mtbf-hours", "nan"), "mtbf-hours = nan: must be a number above 0"),
        (("--write-gb-s", "-1"), "write-gb-s = -1.0: must be a number above 0"),
        (("--restart-s", "-1"), "restart-s = -1.0: must be 0 or more"),
        (("--shape", "50"), "nearest legal: 10.0"),
        (("--runs", "0"), "nearest legal: 1"),
    ],
)
def test_wrong_values_are_refused(words: tuple[str, ...], message: str) -> None:
    assert message in refusal(LLAMA3, *words)


def test_a_job_is_told_what_it_has_to_expect(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of docs/goodput.md."""
    words = " ".join(run(LLAMA3, "--runs", 20, "--checkpoint.every", 38, capsys=capsys).split())
    assert "expected on 16,384 GPUs: a failure every 3h05m (Llama 3's rate)" in words
    assert "a checkpoint is made every 38 steps" in words
    assert "5 to 95 % of runs" in words
    assert "longest restart for 90%" in words
    assert (
        "Llama 3 405B had more than 90% with 419 unexpected and 47 planned interruptions in 54 days on 16,384 GPUs."
        in words
    )


def test_a_job_is_played_alike_with_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (LLAMA3, "--days", 54, "--runs", 20, "--seed", 3)
    first, again = (reported(*flags, capsys=capsys) for _ in range(2))
    assert first == again
    played, expected = first["played"], first["expected"]["used"]["shares"]
    assert played["mean"] == pytest.approx(expected["productive"], abs=5 * played["standard_error"] + 1e-3)
    assert played["p5"] < played["mean"] < played["p95"]
    assert played["failures"] == pytest.approx(419, rel=0.04)
    assert reported(LLAMA3, "--runs", 20, "--seed", 4, capsys=capsys)["played"] != played


def test_a_job_without_checkpoints_loses_everything(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(run(LLAMA3, "--runs", 2, "--days", 1, "--checkpoint.every", 0, capsys=capsys).split())
    assert "no checkpoint is made (checkpoint.every = 0): a failure loses everything; best is one every" in words
