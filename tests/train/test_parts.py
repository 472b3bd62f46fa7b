"""The pieces around the loop: a process's place, who failed first."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from trigrid.errors import Refused, RunFailed
from trigrid.launch.place import Place, find_place, first_host
from trigrid.train.failure import first_failure, record

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def test_places() -> None:
    assert find_place({}) is None
    assert find_place(TORCHRUN) == Place(5, 8, 1, 4, "a", 1, "torchrun")
    assert find_place(SRUN) == Place(5, 8, 1, 4, "gpu003", 23_456, "srun")
    assert find_place({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3"}) == Place(5, 8, 1, 3, "gpu003", 23_456, "srun")
    assert find_place({**SRUN, "SLURM_NTASKS": "1"}) is None
    assert find_place({**SRUN, "MASTER_ADDR": "b", "MASTER_PORT": "7"}) == Place(5, 8, 1, 4, "b", 7, "srun")


@pytest.mark.parametrize("bad", [{"RANK": "8"}, {"RANK": "x"}, {"WORLD_SIZE": "-1"}, {"MASTER_PORT": ""}])
def test_a_broken_launcher_is_told(bad: dict[str, str]) -> None:
    with pytest.raises(Refused) as told:
        find_place({**TORCHRUN, **bad})
    assert next(iter(bad)) in str(told.value)


@pytest.mark.parametrize("bad", [{"SLURM_STEP_TASKS_PER_NODE": "4(x"}, {"SLURM_NODEID": "2"}, {"SLURM_PROCID": ""}])
def test_a_broken_srun_is_told(bad: dict[str, str]) -> None:
    with pytest.raises(Refused) as told:
        find_place({**SRUN, **bad})
    assert next(iter(bad)) in str(told.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[003-010,014],login1", "gpu003"), ("a,b", "a"), ("node7", "node7"), ("n[9]", "n9"), ("", "127.0.0.1")],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_the_rank_that_a_signal_ended_is_named_before_those_that_missed_it(tmp_path: Path) -> None:
    record(tmp_path, 0, RuntimeError("connection closed by peer"))
    told = first_failure(tmp_path, {0: 1, 2: -signal.SIGKILL})
    assert str(told).startswith("rank 2 was ended by SIGKILL")
    told = first_failure(tmp_path, {0: 1, 2: -signal.SIGABRT})
    assert str(told).startswith("rank 0 failed: RuntimeError"), "NCCL aborts those whose peer has gone"


def test_the_first_error_is_told(tmp_path: Path) -> None:
    for rank, when in ((1, 20.0), (3, 10.0), (0, 30.0)):
        record(tmp_path, rank, ValueError(f"error of {rank}"))
        path = tmp_path / "errors" / f"rank-{rank}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "when_s": when}))
    told = first_failure(tmp_path, {0: 1, 1: 1, 3: 1})
    assert isinstance(told, RunFailed)
    assert str(told) == "rank 3 failed: ValueError: error of 3"


def test_a_users_mistake_stays_one(tmp_path: Path) -> None:
    from trigrid.errors import Problem

    record(tmp_path, 1, Refused([Problem("run.device", "cuda", "no")]))
    told = first_failure(tmp_path, {1: 2})
    assert not isinstance(told, RunFailed)
    assert str(told) == "run.device = cuda: no"


def test_ranks_that_say_nothing(tmp_path: Path) -> None:
    assert "rank 1: exit code 7" in str(first_failure(tmp_path, {1: 7}))
