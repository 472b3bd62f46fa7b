"""How a run stands, by files made by hand and by one that was trained."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import run, run_dir, write_job

from trigrid.job import dump_job, job_from_text, load_job
from trigrid.report.status import (
    FAILED,
    FINISHED,
    HUNG,
    PREEMPTED,
    RUNNING,
    SILENT,
    STARTING,
    Status,
    status_of,
    status_text,
)

JOB = """
[model]
name = "tiny"
vocab = 300
hidden = 32
layers = 4
heads = 4
kv_heads = 2
head_dim = 8
ffn = 48
context = 64
[batch]
sequence = 32
global_batch = 8
[run]
steps = 100
"""
BEGIN_S = 1e9


class Folder:
    """A run whose clock goes on with what it tells."""

    def __init__(self, path: Path) -> None:
        self.path, self.now_s, self.step = path, BEGIN_S, 0
        self.job = job_from_text(JOB)
        (path / "job.toml").write_text(dump_job(self.job))

    def tell(self, file: str, kind: str, after_s: float = 0.0, **values: Any) -> None:
        self.now_s += after_s
        with (self.path / f"{file}.jsonl").open("a") as lines:
            lines.write(json.dumps({"kind": kind, "time_s": self.now_s, **values}) + "\n")

    def launch(self, step: int = 0) -> None:
        self.tell("events", "launch", 5, world=8, restart=0)
        self.tell("events", "start", 20, step=step, resumed=bool(step), checkpoint=None, world=8)
        self.tell("metrics", "start")
        self.step = step

    def train(self, steps: int, step_s: float = 2.0, **values: Any) -> None:
        for _ in range(steps):
            self.step += 1
            left_s = (100 - self.step) * step_s
            rates = {"tokens_per_s": 128.0, "mfu_full": 0.4, "eta_s": left_s, **values}
            self.tell("metrics", "step", step_s, step=self.step, step_s=step_s, loss=5.0 - self.step / 100, **rates)
            if self.step == 1:
                self.tell("events", "first_step", step=1, step_s=step_s)

    def save(self) -> None:
        self.tell("events", "checkpoint_begin", step=self.step)
        self.tell("events", "checkpoint", 1, step=self.step, seconds=1.0, blocked_s=0.2, bytes=10)

    def fail(self, rank: int, message: str, host: str = "node3") -> None:
        values = {"rank": rank, "when_s": self.now_s, "message": message, "refused": False, "trace": "", "host": host}
        (self.path / "errors").mkdir(exist_ok=True)
        (self.path / "errors" / f"rank-{rank}.json").write_text(json.dumps(values))

    def status(self, after_s: float = 1.0) -> Status:
        found = status_of(self.path, self.job, self.now_s + after_s)
        assert found is not None
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_run_that_starts_then_trains_then_ends(folder: Folder) -> None:
    assert status_of(folder.path, folder.job, BEGIN_S) is None
    folder.launch()
    assert folder.status().state == STARTING
    # Its first step may compile for as long as its watchdog lets it.
    assert folder.status(folder.job.faults.first_step_s - 1).state == STARTING
    folder.train(10)
    folder.save()
    folder.train(5)
    found = folder.status(3.0)
    assert (found.state, found.step, found.steps, found.restarts) == (RUNNING, 15, 100, 0)
    assert (found.loss, found.tokens_per_s, found.mfu, found.step_s) == (4.85, 128.0, 0.4, 2.0)
    # What was left at its last line, less what has passed since.
    assert found.eta_s == 85 * 2 - 3
    assert (found.checkpoint_step, found.checkpoint_age_s, found.unsaved_steps) == (10, 5 * 2 + 3, 5)
    text = status_text(found)
    assert "step 15 of 100, loss 4.8500, 128 tok/s, MFU 40.0%, 2m47s left" in text
    assert "checkpoint of step 10, 13s ago; 5 steps after it would be lost" in text
    folder.tell("events", "end", step=100)
    assert folder.status(1e6).state == FINISHED
    assert folder.status(1e6).eta_s is None


def test_a_run_that_says_nothing_for_long_is_silent(folder: Folder) -> None:
    """Its heartbeat is its lines: five times as long as between two of them, a minute at least."""
    folder.launch()
    folder.train(20, step_s=30.0)
    assert folder.status(140.0).state == RUNNING
    found = folder.status(160.0)
    assert (found.state, found.patience_s) == (SILENT, 150.0)
    assert "silent for 2m40s, where 2m30s is long: killed, or stuck" in status_text(found)


def test_the_rank_that_failed_first_is_named_with_its_host(folder: Folder) -> None:
    """Ranks under torchrun and srun leave their errors, and nobody tells the run's events of them."""
    folder.launch()
    folder.train(3)
    folder.fail(5, "disk is full\nand more")
    folder.now_s += 1
    folder.fail(2, "connection closed by peer", host="node1")
    found = folder.status()
    assert found.state == FAILED
    assert found.fault is not None
    assert (found.fault.rank, found.fault.host) == (5, "node3")
    assert "  rank 5 on node3: disk is full\n    and more\n" in status_text(found)
    # Started again: what was left before is of another life.
    folder.tell("events", "failed", rank=5, host="node3", reason="rank 5 on node3 failed: disk is full", signal=None)
    folder.launch(step=0)
    folder.train(1)
    found = folder.status()
    assert (found.state, found.restarts, found.fault) == (RUNNING, 1, None)
    assert "running, restarted 1 time\n" in status_text(found)


def test_a_failure_that_only_its_launcher_saw(folder: Folder) -> None:
    folder.launch()
    folder.train(3)
    reason = "rank 1 was ended by SIGKILL; its log is in logs"
    folder.tell("events", "failed", rank=1, reason=reason, signal="SIGKILL", detected_s=0.1)
    found = folder.status()
    assert found.state == FAILED
    assert f"\n  rank 1: {reason}\n" in status_text(found) or f"\n  {reason}\n" in status_text(found)


def test_a_run_that_hangs_and_one_that_was_preempted(folder: Folder) -> None:
    folder.launch()
    folder.train(3)
    folder.tell("events", "hung", 600, missing=[], cut_off=["node3"], actions={}, phase="step 4", stuck_s=600)
    folder.fail(0, "nothing has gone on for 600 s in step 4\ncut off: node3", host="node1")
    found = folder.status()
    assert found.state == HUNG
    assert "cut off: node3" in status_text(found)
    folder.tell("events", "failed", rank=0, reason="hung", signal=None)
    folder.launch(step=0)
    folder.train(2)
    folder.tell("events", "preempted", step=2, signal="SIGUSR1", checkpoint=None)
    found = folder.status(1e5)
    assert (found.state, found.preempted_by) == (PREEMPTED, "SIGUSR1")
    assert status_text(found).splitlines()[0].endswith(": preempted by SIGUSR1, restarted 1 time")


def test_a_slow_rank_is_told(folder: Folder) -> None:
    """R93: whom the others wait for."""
    folder.launch()
    folder.train(3, slowest_rank=6, slowest_busy_s=1.9, usual_busy_s=1.0)
    assert folder.status().slow_rank == 6
    folder.train(1, slowest_rank=6, slowest_busy_s=1.1, usual_busy_s=1.0)
    assert folder.status().slow_rank is None


def test_of_a_run_that_was_trained(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    code, _, err = run("train", job, "--run.trackers", "[]", "--quiet")
    assert code == 0, err
    folder = run_dir(job)
    code, out, err = run("status", folder, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["schema"], found["state"], found["step"]) == ("trigrid.status/1", FINISHED, 4)
    code, out, _ = run("status", folder, "--follow", "--every", 0.1)
    assert (code, out.splitlines()[0]) == (0, f"{folder.name}: finished")
    # Silent runs, failed ones and those that hang are told by the exit code.
    events = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("\n".join(line for line in events if '"end"' not in line) + "\n")
    found = status_of(folder, load_job(folder / "job.toml", env={}), time.time() + 1e6)
    assert found is not None
    assert found.state == SILENT


def test_mistakes_are_refused(tmp_path: Path) -> None:
    code, _, err = run("status", tmp_path)
    assert code == 2
    assert "is no folder of a run" in err
