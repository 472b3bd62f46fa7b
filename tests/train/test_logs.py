"""Logs and errors of ranks that a launcher of another kind has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trigrid.launch.place import RUN_DIR_VARIABLE
from trigrid.report.events import read_events
from trigrid.report.failures import failures
from trigrid.train.logs import tell_earlier

RANK = """\
import os, subprocess, sys
from pathlib import Path
from trigrid.errors import RunFailed
from trigrid.train.logs import own_log
rank, fault = int(sys.argv[2]), sys.argv[3]
try:
    with own_log(Path(sys.argv[1]), rank):
        print("said")
        subprocess.run(["sh", "-c", "echo from a library >&2"])
        if fault:
            raise RunFailed(fault)
except RunFailed as error:
    print(error, file=sys.stderr)
print("over")
"""


def rank(folder: Path, number: int, fault: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RANK, str(folder), str(number), fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done


def test_a_rank_has_a_log_and_its_error_is_on_the_console(tmp_path: Path) -> None:
    done = rank(tmp_path, 3, "disk is full", SLURMD_NODENAME="node7")
    assert (done.stdout, done.stderr) == ("over\n", "disk is full\n")
    assert sorted((tmp_path / "logs" / "rank-3.log").read_text().splitlines()) == ["from a library", "said"]
    # Who ends after it does not tell a tale of its own.
    after = rank(tmp_path, 5, "connection closed by peer", SLURMD_NODENAME="node8")
    assert after.stderr == "ended after rank 3 on node7 had failed: disk is full\n"
    assert [(failure.rank, failure.host) for failure in failures(tmp_path)] == [(3, "node7"), (5, "node8")]
    # Those that start again note why, once.
    tell_earlier(tmp_path)
    tell_earlier(tmp_path)
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["rank"], event["host"]) == ("failed", 3, "node7")
    assert event["reason"] == "rank 3 on node7 failed: disk is full"
    assert failures(tmp_path) == []


def test_the_first_rank_speaks_on_the_console(tmp_path: Path) -> None:
    done = rank(tmp_path, 0)
    assert (done.stdout, done.stderr) == ("said\nover\n", "from a library\n")
    assert not (tmp_path / "logs").exists()


def test_ranks_that_trigrid_started_have_their_logs_already(tmp_path: Path) -> None:
    done = rank(tmp_path, 3, "disk is full", **{RUN_DIR_VARIABLE: str(tmp_path)})
    assert done.stdout.splitlines() == ["said", "over"]
    assert not (tmp_path / "logs").exists()
    assert failures(tmp_path) == []


def test_a_folder_that_takes_no_log_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    assert rank(tmp_path, 3).stdout.splitlines() == ["said", "over"]
