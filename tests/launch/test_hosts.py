"""Several hosts, which are network namespaces: a job over them, a link that is cut, links that are slow."""

from __future__ import annotations

import json
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.hosts import Host, as_rank, ended, far, hosts_of, need_hosts, torchrun
from helpers.runs import metrics, run, wait_for, write_job

from trigrid.job import load_job
from trigrid.report.events import read_events
from trigrid.report.failures import first_record
from trigrid.report.status import HUNG, status_of, status_text

STEPS, STEP_S = 24, 12.0
FAST, SLOW = 800.0, 40.0
"""Mbit/s."""
LONGEST_S = 600.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    need_hosts()
    with hosts_of(4) as found:
        yield found


def launch(hosts: list[Host], job: Path, *flags: object) -> list[subprocess.Popen[str]]:
    cube = ("--tp", 2, "--pp", 2, "--dp", 2, "--cluster.gpus_per_node", 2)
    return [torchrun(host, hosts, 2, "train", job, *cube, *flags) for host in hosts]


def losses(folder: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in metrics(folder, "step")}


def saved(folder: Path) -> bool:
    """Whether a checkpoint of the run is complete."""
    return any(event["kind"] == "checkpoint" for event in read_events(folder))


def test_a_link_that_is_cut_is_named_and_the_job_goes_on_after(hosts: list[Host], tmp_path: Path) -> None:
    """R90: all ranks live and wait for each other; the node that the network does not reach is named."""
    flags = ("--steps", STEPS, "--checkpoint.every", 5, "--run.trackers", "[]", "--optimizer.warmup_steps", 0)
    alone = write_job(tmp_path)
    code, _, err = run("train", alone, *flags, "--run.out", tmp_path / "alone", "--checkpoint.every", 0)
    assert code == 0, err
    (undisturbed,) = map(losses, (tmp_path / "alone").iterdir())

    processes = launch(hosts, alone, *flags, "--faults.step_s", STEP_S)
    try:
        folder = wait_for(lambda: next(iter((tmp_path / "runs").glob("job-*")), None), LONGEST_S)
        wait_for(lambda: saved(folder) or any(process.poll() is not None for process in processes), LONGEST_S)
        hosts[2].cut()
    finally:
        told = ended(processes, LONGEST_S)
    assert saved(folder), told
    assert [code for code, _, _ in told] == [1] * 4
    failure = first_record(folder)
    assert failure is not None
    lines = failure.message.splitlines()
    assert "(faults.step_s = 12 s)" in lines[0]
    assert lines[1].startswith("cut off: host3, ranks 4-5: the node is not reached over the network by the others")
    hung = next(event for event in read_events(folder) if event["kind"] == "hung")
    assert (hung["cut_off"], hung["missing"]) == (["host3"], [])
    # Who speaks says it on its host's console, and nobody else has anything to add.
    assert sum("cut off: host3" in err for _, _, err in told) == 1
    assert {path.name for path in (folder / "logs").iterdir()} == {f"rank-{rank}.log" for rank in range(1, 8)}
    status = status_of(folder, load_job(folder / "job.toml"), time.time())
    assert status is not None
    assert (status.state, status.restarts) == (HUNG, 0)
    assert "cut off: host3" in status_text(status)

    hosts[2].mend()
    told = ended(launch(hosts, alone, *flags, "--resume", "latest"), LONGEST_S)
    assert [code for code, _, _ in told] == [0] * 4, "".join(err for _, _, err in told)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]
    assert losses(folder) == pytest.approx(undisturbed, rel=1e-9)
    kinds = [event["kind"] for event in read_events(folder)]
    assert kinds.index("hung") < kinds.index("failed") < len(kinds) - 1 - kinds[::-1].index("launch")
    assert kinds[-1] == "end"


def test_doctor_names_the_slow_link(hosts: list[Host], tmp_path: Path) -> None:
    for host in hosts:
        host.limit(FAST)
    hosts[3].limit(SLOW)
    job = write_job(tmp_path)
    cube = ("--pp", 2, "--dp", 2, "--cluster.gpus_per_node", 1)
    told = ended([as_rank(host, hosts, "doctor", job, *cube, "--json", "--seconds", 20) for host in hosts], LONGEST_S)
    assert [code for code, _, _ in told] == [1] * 4, "".join(err for _, _, err in told)
    found = json.loads(told[0][1])
    assert (found["sound"], found["world"], found["hosts"]) == (False, 4, [host.name for host in hosts])
    by_name = {finding["what"]: finding for finding in found["findings"]}
    messages = by_name["messages between nodes"]
    assert (messages["verdict"], messages["where"]) == ("wrong", ["host4"])
    assert "rank 3 (host4)" in messages["advice"]
    assert SLOW / 2 < messages["value"] * 8 / 1e6 < SLOW * 2
    # One machine has one clock.
    assert by_name["clocks of nodes"]["verdict"] == "sound"
    assert by_name["NVLink" if "NVLink" in by_name else "GPU"]["verdict"] == "not here"


def test_calibrate_finds_the_bandwidth_of_every_tier(hosts: list[Host], tmp_path: Path) -> None:
    """Four hosts of two ranks, two hosts under each leaf: memory inside a host, links to the leaf that its two ranks
    share, and a link between leaves that all four pairs share."""
    for host in hosts:
        host.limit(FAST / 2)
    out = tmp_path / "cluster.toml"
    flags = ("--nodes-per-leaf", 2, "--out", out, "--seconds", 4, "--device", "cpu", "--dtypes", "fp32", "--quiet")
    with far(hosts[2:], FAST / 2):
        told = ended([torchrun(host, hosts, 2, "calibrate", *flags) for host in hosts], LONGEST_S)
    assert [code for code, _, _ in told] == [0] * 4, "".join(err for _, _, err in told)
    wires = tomllib.loads(out.read_text())["wires"]
    mbit = {wire["tier"]: wire["link_Bps"] * 8 / 1e6 for wire in wires if wire["kind"] == "message"}
    assert mbit["nvlink"] > FAST
    assert mbit["leaf"] == pytest.approx(FAST / 2 / 2, rel=0.4)
    assert mbit["spine"] == pytest.approx(FAST / 2 / 4, rel=0.4)
