"""What the process that starts the ranks makes of ends and of signals: with ranks that do not train, and a run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.runs import metrics, ranks_of, run_dir, start, wait_for, write_job

from trigrid.errors import RunFailed, TrigridError
from trigrid.report.console import Console
from trigrid.report.events import read_events
from trigrid.train import agent, local
from trigrid.train.local import run_ranks
from trigrid.train.stopping import Preempted, read_marker

RANK = """
import os, signal, sys, time
from pathlib import Path
from trigrid.errors import Problem, Refused, RunFailed
from trigrid.train import stopping
from trigrid.train.failure import record
folder, rank, attempt = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def fail(error):
    record(folder, rank, error)
    os._exit(1)
"""
"""The beginning of each rank's program."""


def ranks(body: str, run_dir: Path, max_restarts: int = 0, grace_s: float = 20.0) -> Preempted | None:
    """Two of them."""
    program = (sys.executable, "-c", RANK + body, str(run_dir))
    return run_ranks(program, 2, run_dir, grace_s, Console(quiet=True), max_restarts)


def kinds(folder: Path) -> list[str]:
    return [event["kind"] for event in read_events(folder)]


def test_after_a_kill_all_start_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """R96: rank 0 would wait for ever, and has no ear for SIGTERM, which means to save and stop."""
    begun = time.monotonic()
    body = (
        "if attempt == 0 and rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if attempt == 0:\n    stopping.install()\n    time.sleep(60)\n"
    )
    assert ranks(body, tmp_path, max_restarts=1) is None
    assert time.monotonic() - begun < 40
    launch, failed, again = read_events(tmp_path)
    assert (launch["kind"], launch["world"], launch["restart"]) == ("launch", 2, 0)
    assert (again["kind"], again["restart"]) == ("launch", 1)
    assert (failed["kind"], failed["rank"], failed["signal"]) == ("failed", 1, "SIGKILL")
    assert failed["reason"].startswith("rank 1 was ended by SIGKILL")
    assert failed["detected_s"] < 5
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: rank 1 was ended by SIGKILL; its log is in ")
    assert warning.endswith("; all ranks start again from the last complete checkpoint")


def test_the_first_failure_of_the_last_attempt_is_told(tmp_path: Path) -> None:
    """Rank 1 fails first and ends last; what the attempt before has left, in errors/ and stalls/, is gone."""
    body = (
        "(folder / 'stalls').mkdir(exist_ok=True)\n(folder / 'stalls' / f'rank-{attempt}.json').write_text('{}')\n"
        "if attempt == 0:\n    fail(RunFailed('the first attempt'))\n"
        "if rank == 0:\n    time.sleep(0.3)\n    fail(RuntimeError('connection closed'))\n"
        "record(folder, 1, RunFailed('the second attempt'))\ntime.sleep(1)\nos._exit(1)\n"
    )
    with pytest.raises(RunFailed, match="rank 1 failed: the second attempt"):
        ranks(body, tmp_path, max_restarts=1)
    assert kinds(tmp_path) == ["launch", "failed", "launch", "failed"]
    assert [path.name for path in (tmp_path / "stalls").iterdir()] == ["rank-1.json"]


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    body = "fail(Refused([Problem('data.corpus', 'x', 'is not there')]))\n"
    with pytest.raises(TrigridError, match=r"data\.corpus = x: is not there"):
        ranks(body, tmp_path, max_restarts=3)
    assert kinds(tmp_path) == ["launch", "failed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_signal_reaches_ranks_that_have_just_been_started(tmp_path: Path, number: signal.Signals) -> None:
    """It comes while they have no handler yet, and again; the run ends with a marker, and does not start again."""
    body = (
        "(folder / f'here-{rank}').touch()\ntime.sleep(0.5)\nstopping.install()\n"
        "while not stopping.asked():\n    time.sleep(0.01)\n"
        "if rank == 0:\n    stopping.mark(folder, 5, None, stopping.asked())\n"
    )

    def tell() -> None:
        wait_for(lambda: (tmp_path / "here-0").exists() and (tmp_path / "here-1").exists())
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=tell).start()
    marker = ranks(body, tmp_path, max_restarts=2)
    assert marker is not None
    assert (marker.step, marker.checkpoint, marker.signal) == (5, None, number.name)
    assert kinds(tmp_path) == ["launch"]
    assert signal.getsignal(number) is before


def test_ranks_that_do_not_end_in_their_time_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MARGIN_S", 0.5)
    threading.Thread(
        target=lambda: wait_for(lambda: (tmp_path / "here").exists()) and os.kill(os.getpid(), signal.SIGTERM)
    ).start()
    body = "stopping.install()\n(folder / 'here').touch()\ntime.sleep(60)\n"
    with pytest.raises(RunFailed, match="told to stop by SIGTERM, the ranks did not end"):
        ranks(body, tmp_path, max_restarts=2, grace_s=0.5)
    assert kinds(tmp_path).count("launch") == 1


def test_a_marker_of_before_is_gone(tmp_path: Path) -> None:
    (tmp_path / "preempted.json").write_text("{}")
    assert ranks("", tmp_path) is None
    assert read_marker(tmp_path) is None


def test_how_to_go_on_is_told() -> None:
    marker = Preempted(12, "runs/a/checkpoints/step-00000012", "SIGTERM", 0.0)
    told = local._stopped(marker, Path("runs/a"))
    assert told == (
        "stopped by SIGTERM after step 12; checkpoint runs/a/checkpoints/step-00000012; "
        "go on with: trigrid train runs/a/job.toml --resume runs/a"
    )


def test_a_run_whose_rank_is_killed_goes_on(tmp_path: Path) -> None:
    """R96: with --max-restarts the next attempt begins by itself, at the last complete checkpoint."""
    job = write_job(tmp_path)
    flags = ("--dp", "2", "--run.trackers", "[]", "--run.validate_every", "0", "--checkpoint.every", "10")
    process = start("train", job, *flags, "--steps", "150", "--max-restarts", "1")
    wait_for(lambda: (job.parent / "runs").exists() and "checkpoint" in kinds(run_dir(job)))
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "warning: rank 1 was ended by SIGKILL" in err
    events = read_events(run_dir(job))
    (failed,) = (event for event in events if event["kind"] == "failed")
    assert (failed["rank"], failed["signal"]) == (1, "SIGKILL")
    starts = [event for event in events if event["kind"] == "start"]
    assert [event["resumed"] for event in starts] == [False, True]
    assert starts[1]["step"] >= 10
    assert metrics(run_dir(job), "step")[-1]["step"] == 150
