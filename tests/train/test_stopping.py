"""Being told to stop: a signal is noted, all ranks learn of it within the step, and the time of grace is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers.jobs import small_job
from helpers.runs import metrics, ranks_of, run, run_dir, start, wait_for, write_job
from torch import Tensor

from trigrid.check.parity import batch
from trigrid.engine.comm import Comm
from trigrid.engine.units import Microbatch
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.report.events import read_events
from trigrid.spec.layout import Layout
from trigrid.train import stopping
from trigrid.train.failure import first_record

TOLD = """
import os, signal, sys, time
from pathlib import Path
from trigrid.train import stopping
stopping.install()
stopping.install()
print("ready", flush=True)
"""
"""The beginning of a program that is told to stop."""


def program(body: str, *arguments: object) -> subprocess.Popen[str]:
    """TOLD and `body`, ready for signals."""
    process = subprocess.Popen(
        [sys.executable, "-c", TOLD + body, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": "3"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", stopping.SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_noted_and_more_of_them_change_nothing(number: signal.Signals) -> None:
    """R90: preemption; Slurm sends SIGTERM after the signal that was asked for, and both again."""
    process = program(
        "while not stopping.asked():\n    time.sleep(0.01)\n"
        "time.sleep(0.3)\nprint(stopping.asked(), 'torch' in sys.modules)\n"
    )
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"{number.name} False\n", "")


def test_the_time_of_grace_is_kept_where_the_main_thread_hears_nothing(tmp_path: Path) -> None:
    """It waits in C, as in a collective, so that no handler of its own can run."""
    process = program(
        "import ctypes\nstopping.grant(0.5, Path(sys.argv[1]))\n"
        "lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        "lock(mutex)\nprint('waits', flush=True)\nlock(mutex)\n",
        tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    # It says so a moment before.
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)
    begun = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert time.monotonic() - begun < 15
    assert "told to stop by SIGUSR1, but its step and its checkpoint took longer" in err
    assert "(faults.grace_s = 0.5)" in err
    failure = first_record(tmp_path)
    assert failure is not None
    assert failure.rank == 3


def test_what_is_answered_may_take_its_time() -> None:
    process = program("stopping.grant(0.2)\nstopping.answer()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(1)\n")
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)


def test_what_a_rank_forks_is_ended_like_any_process() -> None:
    """And what ends it is not taken for a signal to the rank."""
    process = program(
        "child = os.fork()\nif child == 0:\n    time.sleep(60)\n    os._exit(1)\n"
        "os.kill(child, signal.SIGTERM)\n_, end = os.waitpid(child, 0)\ntime.sleep(0.3)\n"
        "print(os.WTERMSIG(end), stopping.asked())\n"
    )
    assert process.communicate(timeout=60) == ("15 None\n", "")


def test_the_marker(tmp_path: Path) -> None:
    assert stopping.read_marker(tmp_path) is None
    stopping.mark(tmp_path, 12, tmp_path / "checkpoints" / "step-00000012", "SIGTERM")
    marker = stopping.read_marker(tmp_path)
    assert marker is not None
    assert (marker.step, marker.signal) == (12, "SIGTERM")
    assert marker.checkpoint == str(tmp_path / "checkpoints" / "step-00000012")
    stopping.unmark(tmp_path)
    stopping.unmark(tmp_path)
    assert stopping.read_marker(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_step_hands_on_that_one_rank_was_told() -> None:
    """And the actions of a step are known from outside while they run."""
    job = small_job(Layout())
    engine = build_engine(job, Comm(grid_of(job), 0), torch.device("cpu"))
    seen = []
    unit = engine.stages[0].units[1]
    function = unit._function

    def looked_at(w: Mapping[str, Tensor], x: Tensor, microbatch: Microbatch) -> Tensor:
        seen.append(str(engine.comm.activity.action))
        return function(w, x, microbatch)

    unit._function = looked_at
    tokens, labels = batch(job, 0)
    rows = (rows.view(-1, job.batch.micro_batch, job.batch.sequence) for rows in (tokens, labels))
    result = engine.step(*rows, 1e-3, stop=True)
    assert result.asked_to_stop
    assert result.updated
    assert "F0.0" in seen
    assert engine.comm.activity.action == "update"
    assert engine.comm.activity.waiting is None
    rows = (rows.view(-1, job.batch.micro_batch, job.batch.sequence) for rows in batch(job, 1))
    assert not engine.step(*rows, 1e-3).asked_to_stop


@pytest.mark.parametrize("whom", ["one rank", "launcher"])
def test_a_run_that_is_told_to_stop_saves_and_goes_on(tmp_path: Path, whom: str) -> None:
    """R90, R94: SIGUSR1 to one of two ranks, or SIGTERM to the process that started them: all stop after the same step,
    exit code 0, a marker, a checkpoint; resumed, the marker is gone and the steps go on."""
    job = write_job(tmp_path)
    flags = ("--dp", "2", "--run.trackers", "[]", "--run.validate_every", "0")
    process = start("train", job, *flags, "--steps", "100000", "--checkpoint.every", "100000")
    wait_for(lambda: (job.parent / "runs").exists() and metrics(run_dir(job), "step"))
    if whom == "launcher":
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
    else:
        os.kill(ranks_of(job)[1], signal.SIGUSR1)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    folder = run_dir(job)
    marker = stopping.read_marker(folder)
    assert marker is not None
    assert marker.checkpoint is not None
    assert Path(marker.checkpoint).name == f"step-{marker.step:08d}"
    assert metrics(folder, "step")[-1]["step"] == marker.step
    way_on = f"go on with: trigrid train {folder}/job.toml --resume {folder}"
    assert f"after step {marker.step}; checkpoint {marker.checkpoint}; {way_on}" in err
    assert "Traceback" not in err
    kinds = [event["kind"] for event in read_events(folder)]
    assert kinds[0] == "launch"
    assert kinds[-1] == "preempted"
    if whom == "launcher":
        assert marker.signal == "SIGTERM"
        return
    steps = marker.step + 2
    code, _, err = run("train", job, *flags, "--steps", str(steps), "--resume", folder)
    assert code == 0, err
    assert stopping.read_marker(folder) is None
    assert [entry["step"] for entry in metrics(folder, "step")] == list(range(1, steps + 1))
