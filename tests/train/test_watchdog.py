"""Runs in which nothing goes on: who is named, and that all end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from helpers.in_process import quick, train
from helpers.runs import metrics, ranks_of, run_dir, wait_for, write_job
from helpers.runs import start as start_run

from trigrid.engine.activity import Activity, Waiting
from trigrid.errors import Refused
from trigrid.report.events import read_events
from trigrid.schedule import Action, Kind
from trigrid.spec.job import Faults
from trigrid.train import trainer
from trigrid.train.failure import first_record
from trigrid.train.stall import Report, missing, ranks_text, read_reports, verdict
from trigrid.train.watchdog import Watchdog

STEP_S = 1.0
FAULTS = Faults(start_s=60, first_step_s=60, step_s=STEP_S, checkpoint_s=60)
EVERYONE = Waiting("all_reduce", "world", (0, 1, 2, 3))
FORWARD = Action(Kind.FORWARD, 1, 0)


def rank_of_four(rank: int, doing: str, run_dir: Path) -> None:
    """A rank without torch, in its second step: what it is `doing` from then on."""
    activity = Activity()
    with Watchdog(activity, FAULTS, run_dir, rank, 4) as watchdog:
        watchdog.phase("step 1")
        watchdog.phase("step 2")
        activity.act(FORWARD)
        if doing == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if doing in ("waits", "wakes"):
            activity.wait(EVERYONE)
        if doing == "wakes":
            time.sleep(1.5 * STEP_S)
        if doing in ("goes on", "wakes"):
            for _ in range(40):
                activity.act("update")
                time.sleep(0.1)
        elif doing == "saves":
            watchdog.phase("checkpoint")
            time.sleep(4 * STEP_S)
        else:
            time.sleep(60)
    os._exit(0)


def start(run_dir: Path, *doing: str) -> list[BaseProcess]:
    fork = get_context("fork")
    ranks: list[BaseProcess] = [
        fork.Process(target=rank_of_four, args=(i, what, run_dir)) for i, what in enumerate(doing)
    ]
    for process in ranks:
        process.start()
    return ranks


def ends(ranks: list[BaseProcess], timeout_s: float = 30.0) -> list[int | None]:
    """Exit codes; None for a rank that runs still, which is killed."""
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes


def test_a_stopped_rank_is_named_missing(tmp_path: Path) -> None:
    """R90: rank 2 is stopped, the others wait for it: it is named, they are not, and all that can end do."""
    ranks = start(tmp_path, "waits", "waits", "stops", "waits")
    begun = time.monotonic()
    assert ends([ranks[i] for i in (0, 1, 3)]) == [1, 1, 1]
    assert time.monotonic() - begun < 20
    ends([ranks[2]], 0)
    failure = first_record(tmp_path)
    assert failure is not None
    assert failure.rank == 0
    lines = failure.message.splitlines()
    assert lines[0].endswith("in step 2 (faults.step_s = 1 s)")
    assert lines[1] == "missing: rank 2: no word from it, so it is stopped, dead or cut off"
    assert lines[2].startswith("  ranks 0-1, 3: step 2, F1.0, waits for all_reduce over world of ranks 0-3, unchanged ")
    assert len(lines) == 3
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["missing"], event["phase"]) == ("hung", [2], "step 2")


def test_a_rank_that_waits_for_nobody_is_named_with_its_action(tmp_path: Path) -> None:
    """R90: it lives and says so itself; rank 0 is stopped as well, so another one speaks."""
    ranks = start(tmp_path, "stops", "waits", "waits", "sleeps")
    assert ends(ranks[1:]) == [1, 1, 1]
    ends(ranks[:1], 0)
    failure = first_record(tmp_path)
    assert failure is not None
    assert failure.rank == 1
    lines = failure.message.splitlines()
    assert lines[1].startswith("missing: rank 0: ")
    assert lines[2] == "hung or slow: rank 3: others may wait for it, it for nobody"
    assert lines[3].startswith("  rank 3: step 2, F1.0, busy at train/test_watchdog.py:")
    assert " in rank_of_four, unchanged for " in lines[3]


def test_a_slow_rank_is_named_and_those_that_wait_for_it_are_not(tmp_path: Path) -> None:
    """R93: it makes progress, and would not have called; those that wait for it have waited too long."""
    codes = ends(start(tmp_path, "waits", "waits", "goes on", "waits"))
    assert [codes[rank] for rank in (0, 1, 3)] == [1, 1, 1]
    failure = first_record(tmp_path)
    assert failure is not None
    lines = failure.message.splitlines()
    assert lines[1] == "hung or slow: rank 2: others may wait for it, it for nobody"
    assert lines[2].startswith("  rank 2: step 2, update, busy at ")
    assert lines[2].endswith("unchanged for 0 s")


def test_who_called_and_goes_on_after_all_ends_nobody(tmp_path: Path) -> None:
    assert ends(start(tmp_path, "goes on", "wakes")) == [0, 0]
    assert list((tmp_path / "stalls").iterdir()) == []


def test_phases_have_limits_of_their_own(tmp_path: Path) -> None:
    """A checkpoint takes longer than a step may, and ranks that go on do not end."""
    assert ends(start(tmp_path, "goes on", "saves", "goes on", "saves")) == [0, 0, 0, 0]
    assert not (tmp_path / "stalls").exists()


@pytest.mark.parametrize(("sleeps_s", "called"), [([0.2] * 8, True), ([0.2, 0.2, 100.0, 0.2], False)])
def test_a_job_that_was_suspended_is_not_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeps_s: list[float], called: bool
) -> None:
    """The thread looks every 0.2 s, and counts no more than that where it finds that it has not run for long."""
    watchdog = Watchdog(Activity(), replace(FAULTS, start_s=STEP_S), tmp_path, 0, 1)
    clock, calls = [1000.0], []

    def wait(_: float) -> bool:
        if not sleeps_s:
            return True
        clock[0] += sleeps_s.pop(0)
        return False

    monkeypatch.setattr(watchdog._over, "wait", wait)
    monkeypatch.setattr(watchdog, "_goes_on", lambda stuck_s: calls.append(stuck_s))
    monkeypatch.setattr("trigrid.train.watchdog.time.monotonic", lambda: clock[0])
    watchdog._watch()
    assert bool(calls) == called


def test_what_an_earlier_attempt_has_left_is_not_believed(tmp_path: Path) -> None:
    old = Report(1, "step 7", None, None, 9.0, (), time.time() - 60)
    old.save(tmp_path)
    (tmp_path / "stalls" / "call").write_text(str(time.time() - 60))
    assert ends(start(tmp_path, "goes on")) == [0]
    assert read_reports(tmp_path, 4, time.time() - 30) == {}


def test_a_run_that_was_refused_is_watched_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes on without it would be ended after faults.start_s: this one, half an hour from now."""

    def refuse(_: object) -> str:
        raise Refused(["no"])

    monkeypatch.setattr(trainer, "check_products", refuse)
    with pytest.raises(Refused, match="no"):
        train(write_job(tmp_path), *quick(1))
    for thread in threading.enumerate():
        if thread.name == "watchdog":
            thread.join(10)
            assert not thread.is_alive()


def test_which_limit_holds() -> None:
    watchdog = Watchdog(Activity(), FAULTS, Path(), 0, 1)
    limits = []
    for phase in ("start", "checkpoint", "start", "step 41", "checkpoint", "step 42", "validation", "step 43"):
        watchdog.phase(phase)
        limits.append(watchdog._limit)
    first, then = "first_step_s", "step_s"
    assert limits == ["start_s", "checkpoint_s", "start_s", first, "checkpoint_s", then, then, then]


def test_sixteen_thousand_ranks_are_a_page() -> None:
    """R90: pipelines of 16, all waiting for each other's messages and for one rank that is not there."""
    world, reports = 16_384, {}
    for rank in range(world):
        peer = Waiting("receive from", "", (rank - 8,))
        action = Action(Kind.FORWARD, rank // 8 % 16, rank % 5)
        reports[rank] = Report(rank, "step 900", str(action), peer, 600 + rank % 3, ("a.py:1 in f",), 0.0)
    del reports[4711]
    reports[77] = Report(77, "step 900", "B3.1", None, 601.0, ("units.py:88 in forward",), 0.0)
    text = verdict(reports, world)
    lines = text.splitlines()
    assert missing(reports, world) == [4711]
    assert lines[0].startswith("missing: rank 4711: ")
    assert lines[1].startswith("hung or slow: rank 77: ")
    assert lines[2] == "  rank 77: step 900, B3.1, busy at units.py:88 in forward, unchanged for 601 s"
    assert lines[3].startswith("  ranks ")
    assert len(lines) == 2 + 16 + 1
    assert max(map(len, lines)) < 250
    assert len(text) < 4000


def test_ranks_in_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 3, 4, 9]) == "ranks 3-5, 9"
    assert ranks_text(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_a_master_that_is_not_there_is_told_in_time() -> None:
    """A rank that does not reach its master ends within faults.start_s, and says so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        "import sys\n"
        "from trigrid.launch.place import Place\n"
        "from trigrid.spec.job import Faults\n"
        "from trigrid.train.processes import open_store, start_limit\n"
        "place, faults = Place(1, 2, 1, 2, '127.0.0.1', int(sys.argv[1]), 'srun'), Faults(start_s=2)\n"
        "with start_limit(place, faults):\n"
        "    open_store(place, faults)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(port)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert f"127.0.0.1:{port}" in last
    assert "faults.start_s" in last


HANGS = """
import os, time
from trigrid.engine.units import Stage
calls, forward = [], Stage.forward
def slowly(*arguments):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 20:
        time.sleep(600)
    return forward(*arguments)
Stage.forward = slowly
from trigrid.cli import main
main()
"""
"""`trigrid`, of which rank 1 sleeps in its twentieth forward."""
FLAGS = ("--dp", "2", "--run.trackers", "[]", "--run.validate_every", "0", "--steps", "100000", "--faults.step_s", "4")


def test_a_rank_that_sleeps_in_an_action_is_named_under_torchrun(tmp_path: Path) -> None:
    """R90: rank and action, told where the user's own torchrun shows it; all ranks end."""
    job, hangs = write_job(tmp_path), tmp_path / "hangs.py"
    hangs.write_text(HANGS)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.run(
        [sys.executable, *torchrun, str(hangs), "train", str(job), *FLAGS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 1
    assert "\nhung or slow: rank 1: others may wait for it, it for nobody\n" in process.stderr
    (line,) = (line for line in process.stderr.splitlines() if line.startswith("  rank 1: "))
    assert re.match(r"  rank 1: step \d+, F0\.\d, busy at \S*hangs\.py:8 in slowly, unchanged for ", line)
    assert "missing: " not in process.stderr
    assert not ranks_of(job)


def test_a_stopped_rank_of_a_run_is_named_and_all_end(tmp_path: Path) -> None:
    """R90, R96: stopped from outside, it cannot even be told to end; the process that started it kills it."""
    job = write_job(tmp_path)
    process = start_run("train", job, *FLAGS)
    wait_for(lambda: (job.parent / "runs").exists() and len(metrics(run_dir(job), "step")) > 3)
    os.kill(ranks_of(job)[1], signal.SIGSTOP)
    begun = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert time.monotonic() - begun < 60
    assert process.returncode == 1
    assert "trigrid: rank 0 failed: nothing has gone on for " in err
    assert "\nmissing: rank 1: no word from it, so it is stopped, dead or cut off\n" in err
    assert "\n  rank 0: step " in err
    assert not ranks_of(job)
    events = {event["kind"]: event for event in read_events(run_dir(job))}
    assert events["hung"]["missing"] == [1]
    assert events["failed"]["reason"].startswith("rank 0 failed: nothing has gone on")
