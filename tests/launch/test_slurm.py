"""A real Slurm: what is submitted, refused, told to stop, requeued and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import metrics, run, wait_for
from helpers.slurm import Slurm, need

from trigrid.report.events import read_events

TINY = Path(__file__).parents[2] / "examples" / "tiny-3d.toml"
SMALL = (
    *("--model.vocab", "300", "--model.hidden", "48", "--model.head_dim", "8", "--model.ffn", "64", "--seq", "32"),
    *("--global-batch", "8", "--micro-batch", "2", "--precision", "fp64", "--optimizer.warmup_steps", "0"),
    *("--run.validate_every", "0", "--run.trackers", "[]", "--checkpoint.every", "2"),
    *("--data.validation_fraction", "0"),
)
STEPS = 14
LONGEST_S = 300.0
"""For what takes seconds on an idle machine."""


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    """The demo's job, cut down, on a corpus of its own."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(40):
        words = " ".join(f"word{(i * 7 + j * j) % 97} goes to house{j % 13}" for j in range(60))
        (corpus / f"{i}.txt").write_text(words, encoding="utf-8")
    return (*SMALL, "--data.corpus", f'["{corpus}"]', "--data.cache", str(tmp_path / "cache"), "--steps", str(STEPS))


def trigrid(slurm: Slurm, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trigrid", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=slurm.env, capture_output=True, text=True, timeout=LONGEST_S)


def launched(slurm: Slurm, folder: Path, *words: object) -> dict[str, str]:
    """What the launch of the demo over two nodes of four ranks says."""
    command = ("launch", TINY, *words, "--on", "slurm", "--nodes", 2, "--time", 9, "--json")
    done = trigrid(slurm, folder, *command)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["nodes"], answer["ranks_per_node"]) == (2, 4)
    return answer


def wait_while(slurm: Slurm, job: str, condition: Callable[[], Any]) -> None:
    """Until the condition holds; fails at once where the job is over before."""
    wait_for(lambda: condition() or not slurm.state(job), LONGEST_S)
    assert condition()


def losses(folder: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in metrics(folder, "step")}


def pids_of_ranks(job: str) -> list[int]:
    """The processes of the ranks of Slurm's job on this machine, by their rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
            if variables.get("SLURM_JOB_ID") == job and b"trigrid\0train" in (folder / "cmdline").read_bytes():
                found[int(variables["SLURM_PROCID"])] = int(folder.name)
        except (OSError, KeyError, UnicodeDecodeError):
            continue
    return [found[rank] for rank in sorted(found)]


def test_a_job_told_to_stop_is_requeued_and_one_whose_rank_dies_starts_again(
    slurm: Slurm, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """R90, R96, R68: over two nodes of four ranks, SIGUSR1 as before a time limit, then a rank killed outright; the
    losses of all steps are those of one undisturbed process."""
    answer = launched(slurm, tmp_path, *flags, "--max-restarts", 1)
    job, log = answer["job"], Path(answer["log"])
    try:
        folder = tmp_path / answer["run"]
        wait_while(slurm, job, lambda: folder.exists() and len(losses(folder)) >= 2)
        slurm.ask("scancel", "--signal=USR1", job)
        # A requeued job waits for two minutes; started at once, its node takes it for the one that was killed.
        wait_for(lambda: "BeginTime" in slurm.state(job), LONGEST_S)
        marker = json.loads((folder / "preempted.json").read_text())
        assert marker["signal"] == "SIGUSR1"
        assert marker["step"] < STEPS - 4
        slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+5")
        wait_while(slurm, job, lambda: len(losses(folder)) >= marker["step"] + 2)
        os.kill(pids_of_ranks(job)[5], signal.SIGKILL)
        slurm.wait_for_end(job, LONGEST_S)
        assert not (folder / "preempted.json").exists()
    finally:
        print(log.read_text() if log.exists() else "no log")
        slurm.ask("scancel", "--quiet", job)
    assert "JobState=COMPLETED" in slurm.ask("scontrol", "show", "job", job)
    told = log.read_text()
    # Nodes of one leaf, which are not next to each other by their names.
    assert "spine.leaf1  node1  ranks 0–3  dp 0  pp 0–1  tp 0–1\n" in told
    assert "spine.leaf1  node3  ranks 4–7  dp 1  pp 0–1  tp 0–1\n" in told
    assert "tp inside nodes, pp inside nodes, dp between nodes" in told
    assert f"told to stop by SIGUSR1 after step {marker['step']}" in told
    assert "trigrid: start 1 of 1 after a failure" in told
    kinds = [event["kind"] for event in read_events(folder)]
    assert (kinds.count("launch"), kinds.count("preempted"), kinds[-1]) == (3, 1, "end")
    assert len(list((tmp_path / "runs").glob("tiny-3d-*"))) == 1
    code, _, err = run("train", TINY, *flags, "--tp", 1, "--pp", 1, "--dp", 1, "--run.out", tmp_path / "alone")
    assert code == 0, err
    (alone,) = (tmp_path / "alone").iterdir()
    assert losses(folder).keys() == set(range(1, STEPS + 1))
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-9)


def test_what_is_cancelled_stays_cancelled(slurm: Slurm, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """SIGTERM, which `scancel` sends, saves and marks like any signal to stop, and must not bring the job back. Here
    ranks count round the nodes, so that srun's count would tear the pairs of tensor parallelism apart (R45)."""
    four = ("--dp", 1, "--sbatch=--ntasks=4", "--ranks-per-node", 2)
    command = ("launch", TINY, *flags, *four, "--steps", 100_000, "--on", "slurm", "--dry-run")
    script = trigrid(slurm, tmp_path, *command).stdout.replace("--distribution=block", "--distribution=cyclic")
    job = slurm.ask("sbatch", "--parsable", f"--chdir={tmp_path}", text=script)
    try:
        folder = tmp_path / "runs" / f"slurm-{job}"
        wait_while(slurm, job, lambda: folder.exists() and losses(folder))
        slurm.ask("scancel", job)
        slurm.wait_for_end(job, LONGEST_S)
    finally:
        slurm.ask("scancel", "--quiet", job)
    told = (tmp_path / f"tiny-3d-{job}.out").read_text()
    print(told)
    assert "JobState=CANCELLED" in slurm.ask("scontrol", "show", "job", job)
    assert json.loads((folder / "preempted.json").read_text())["signal"] == "SIGTERM"
    assert "ranks 0–1  pp 0  tp 0–1  (srun's 0, 2)\n" in told
    assert "ranks 2–3  pp 1  tp 0–1  (srun's 1, 3)\n" in told


def test_a_job_that_is_preempted_comes_back_and_once_cancelled_does_not(
    slurm: Slurm, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """R96: preemption is SIGTERM and a time of grace, within which the ranks save and end, which Slurm takes for the
    end of the job."""
    answer = launched(slurm, tmp_path, *flags, "--steps", 100_000)
    job, log, folder = answer["job"], Path(answer["log"]), tmp_path / answer["run"]
    urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--time=1", "--output=/dev/null")
    try:
        wait_while(slurm, job, lambda: folder.exists() and len(losses(folder)) >= 2)
        first = slurm.ask("sbatch", "--parsable", *urgent, text="#!/bin/sh\nsleep 1\n")
        wait_for(lambda: "BeginTime" in slurm.state(job), LONGEST_S)
        marker = json.loads((folder / "preempted.json").read_text())
        assert marker["signal"] == "SIGTERM"
        slurm.wait_for_end(first, LONGEST_S)
        slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+5")
        wait_while(slurm, job, lambda: len(losses(folder)) >= marker["step"] + 2)
        slurm.ask("scancel", job)
        slurm.wait_for_end(job, LONGEST_S)
    finally:
        print(log.read_text() if log.exists() else "no log")
        slurm.ask("scancel", "--quiet", job)
    assert "JobState=CANCELLED" in slurm.ask("scontrol", "show", "job", job)
    assert json.loads((folder / "preempted.json").read_text())["step"] > marker["step"]


def test_tensor_parallelism_between_uneven_nodes_is_refused(
    slurm: Slurm, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """R45: three ranks on one node and one on the other, before data is prepared."""
    train = (sys.executable, "-m", "trigrid", "train", TINY, *flags, "--dp", "1", "--pp", "1", "--tp", "4")
    train = (*train, "--model.heads", "4")
    # By itself Slurm fills one node after the other.
    env = {**slurm.env, "MASTER_ADDR": "127.0.0.1"}
    command = ("srun", "--nodelist=node[1-2]", "--nodes=2", "--ntasks=4", *map(str, train))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 2, done.stderr
    assert "nodes have 3 ranks (node1), 1 ranks (node2)" in done.stderr
    assert "nearest legal: 1" in done.stderr
    assert done.stderr.count("parallel.tp = 4") == 1
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--partition", "shrt"), "--partition = shrt: there is no such partition; nearest legal: short"),
        (("--partition", "weird"), "there is no such partition; nearest legal: short, urgent, long, gpu, closed"),
        (("--partition", "closed"), "--partition = closed: is down; nearest legal: short, urgent, long, gpu"),
        (("--time", "1:00:00"), "--time = 1:00:00: is longer than partition short allows; nearest legal: 10:00"),
        (("--nodes", "8", "--tp", "1", "--dp", "4"), "--nodes = 8: partition short has 4 such nodes; nearest legal: 4"),
        (("--partition", "long", "--nodes", "4"), "--nodes = 4: partition long has 2 such nodes; nearest legal: 2"),
        (
            ("--partition", "long", "--device", "cuda", "--nodes", "2"),
            "--partition = long: its nodes have 0 GPUs at most, and 4 are needed; nearest legal: short, urgent, gpu",
        ),
        (("--partition", "gpu", "--device", "cuda", "--nodes", "2"), "partition gpu has 1 such nodes"),
        (("--partition", "gpu", "--gpu-type", "b200", "--device", "cuda"), "its nodes have 0 b200 GPUs at most"),
        (("--constraint", "fast", "--nodes", "2"), "--constraint = refused by Slurm: Invalid feature specification"),
        (("--sbatch=--nodelist=nowhere",), "sbatch --parsable failed"),
    ],
)
def test_what_would_wait_for_ever_is_refused_with_the_way_out(
    slurm: Slurm, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    done = trigrid(slurm, tmp_path, "launch", TINY, "--on", "slurm", *words)
    assert done.returncode == (1 if "failed" in told else 2), done.stderr
    assert told in done.stderr
    assert (done.stdout, slurm.ask("squeue", "--noheader"), list(tmp_path.iterdir())) == ("", "", [])


def test_the_file_is_what_slurm_takes(slurm: Slurm, tmp_path: Path) -> None:
    """As it is printed, from a folder with a space in its name."""
    folder = tmp_path / "my work"
    folder.mkdir()
    script = folder / "job.sbatch"
    asked = ("--nodes", 2, "--partition", "short", "--time", "9", "--cpus-per-rank", 2, "--switches", "1@5:00")
    done = trigrid(slurm, folder, "launch", TINY, "--on", "slurm", *asked, "--env", "A=b c", "--dry-run")
    script.write_text(done.stdout)
    slurm.ask("sbatch", "--test-only", str(script))
    need("shellcheck", package="shellcheck")
    slurm.ask("shellcheck", str(script))
