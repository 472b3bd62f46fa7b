"""`trigrid train`, as a user starts it: a run, and everything that ends one early."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from helpers.runs import metrics, ranks_of, run, run_dir, start, wait_for, write_job

from trigrid.job import load_job

LAYOUT = ("--tp", "2", "--pp", "2")
ENDLESS = ("--steps", "100000")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def test_a_run_gives_the_numbers_of_one_process(job: Path) -> None:
    """TP2 × PP2 under torchrun against one process, from the same job file; what a run leaves behind."""
    code, out, err = run("train", job, *LAYOUT, "--json", "--steps", "6", "--run.check-copies", "true")
    assert code == 0, err
    summary = json.loads(out)
    folder = run_dir(job)
    assert summary["run_dir"] == str(folder)
    assert load_job(folder / "job.toml") == load_job(job, [*LAYOUT, "--steps", "6", "--run.check_copies", "true"])
    (start,) = metrics(folder, "start")
    assert (start["world"], start["tokens_per_step"], start["device"]) == (4, 256, "cpu")
    steps = metrics(folder, "step")
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 5, 6]
    for entry in steps:
        assert entry["tokens_per_s"] == pytest.approx(256 / entry["step_s"])
        assert entry["tokens_per_s_per_rank"] == pytest.approx(entry["tokens_per_s"] / 4)
        assert entry["data_wait_share"] == pytest.approx(entry["data_wait_s"] / entry["step_s"])
        assert 0 < entry["data_wait_share"] < 1
        share = entry["tokens_per_s"] / start["matmul_flops_per_s"]
        assert entry["mfu_full"] == pytest.approx(share * start["flops_per_token_full"])
        assert entry["mfu_causal"] == pytest.approx(share * start["flops_per_token_causal"])
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert (folder / "loss.svg").exists()
    lines = err.splitlines()
    assert "starting 4 processes on this machine" in lines
    assert sum("ETA" in line for line in lines) == 1
    assert "training loss and validation loss" in err
    assert "\x1b" not in err
    assert "warning" not in err

    code, out, err = run("train", job, "--json", "--quiet", "--steps", "6", "--run.out", job.parent / "alone")
    assert (code, err) == (0, "")
    alone = json.loads(out)
    (folder,) = (job.parent / "alone").iterdir()
    for three_d, single in zip(steps, metrics(folder, "step"), strict=True):
        assert three_d["loss"] == pytest.approx(single["loss"], rel=1e-12)
        assert three_d["gradient_norm"] == pytest.approx(single["gradient_norm"], rel=1e-10)
        assert three_d["learning_rate"] == single["learning_rate"], "R83"
    assert summary["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-9)


def test_quiet_reaches_the_ranks_and_warnings_do_too(job: Path) -> None:
    """A tracker that fails costs a warning; the result is printed as ever."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        trackers = ("--run.trackers", '["prometheus"]', "--run.prometheus_port", port)
        code, out, err = run("train", job, "--tp", "2", "--quiet", "--steps", "2", *trackers)
    assert code == 0, err
    (warning,) = err.splitlines()
    assert warning.startswith("warning: run.trackers: prometheus failed, and is told no more: OSError: ")
    assert out.startswith("2 steps, 512 tokens in ")
    assert "median step: " in out
    assert len(metrics(run_dir(job), "step")) == 2


def test_a_blend_trains_alike_with_any_number_of_threads_that_read(job: Path) -> None:
    """The standard library's source and the corpus of the job, three to one, with attention within documents."""
    text = job.read_text()
    job.write_text(text.replace("[data]\ncorpus = [", '[data]\nweights = [3, 1]\ncorpus = ["stdlib", '))
    losses = {}
    for workers in (1, 3):
        out = job.parent / f"workers-{workers}"
        options = ("--data.workers", workers, "--data.document-attention", "true", "--run.out", out)
        code, _, err = run("train", job, *options)
        assert code == 0, err
        assert "  stdlib: " in err
        assert "75.0% of each batch" in err
        (folder,) = out.iterdir()
        losses[workers] = [entry["loss"] for entry in metrics(folder, "step")]
    assert losses[1] == losses[3]
    assert len(losses[1]) == 4


def test_it_joins_under_torchrun(job: Path) -> None:
    """The same job, started by the user's own torchrun; dp follows from the world, and rank 0 alone speaks."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    process = start("train", job, "--tp", "2", "--json", launcher=torchrun, GLOO_SOCKET_IFNAME="lo")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out)["steps"] == 4
    assert load_job(run_dir(job) / "job.toml").parallel.dp == 2
    assert len(metrics(run_dir(job), "step")) == 4


def test_it_joins_under_srun(job: Path) -> None:
    """Two tasks with the variables that srun sets; there is no Slurm here to set them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    tasks = [start("train", job, "--json", **step, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)]
    (out, err), (silent, _) = (task.communicate(timeout=300) for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0], err
    assert json.loads(out)["steps"] == 4
    assert silent == ""


@pytest.mark.parametrize("moment", ["start", "step"])
def test_a_killed_rank_ends_all(job: Path, moment: str) -> None:
    """R96: seconds, not a collective's timeout; the rank is named, nobody stays behind, exit code 1."""
    process = start("train", job, *LAYOUT, *ENDLESS)
    if moment == "step":
        wait_for(lambda: (job.parent / "runs").exists() and metrics(run_dir(job), "step"))
    victims = wait_for(lambda: (found := ranks_of(job)) and len(found) == 4 and found)
    os.kill(victims[2], signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1
    assert "rank 2 was ended by SIGKILL" in err.splitlines()[-1]
    assert not ranks_of(job)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0), (signal.SIGINT, 130)]
)
def test_no_rank_outlives_its_launcher(job: Path, number: signal.Signals, code: int) -> None:
    process = start("train", job, *LAYOUT, *ENDLESS)
    wait_for(lambda: (job.parent / "runs").exists() and metrics(run_dir(job), "step"))
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    wait_for(lambda: not ranks_of(job), timeout_s=20)


def test_ctrl_c_stops_one_process(job: Path) -> None:
    process = start("train", job, *ENDLESS)
    wait_for(lambda: (job.parent / "runs").exists() and metrics(run_dir(job), "step"))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "trigrid: stopped"


def test_an_error_of_one_rank_is_told_first(job: Path) -> None:
    """A token file that was damaged: the message of the rank that read it, not those of the ranks that waited."""
    code, _, err = run("train", job, "--steps", "1")
    assert code == 0, err
    (train,) = (job.parent / "cache").glob("*/train.bin")
    train.write_bytes(train.read_bytes()[:-2])
    code, _, err = run("train", job, *LAYOUT, "--steps", "1")
    assert code == 2
    assert str(train) in err
    assert "Traceback" not in err


def test_a_rank_that_fails_before_it_begins_leaves_word(job: Path) -> None:
    """Its console may be nobody's: what it has to say is found where its launcher looks."""
    job.write_text("")
    code, _, _ = run("train", job, RANK="1", WORLD_SIZE="2", _TRIGRID_RUN_DIR=str(job.parent))
    assert code == 2
    left = json.loads((job.parent / "errors" / "rank-1.json").read_text())
    assert "the file is empty" in left["message"]
    assert left["refused"]


def test_port_in_use(job: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code, _, err = run("train", job, "--tp", "2", **rank)
    assert code == 1
    assert f"MASTER_PORT = {port}: the port is in use" in err.splitlines()[-1]


def test_a_world_that_does_not_fit(job: Path) -> None:
    code, _, err = run("train", job, *LAYOUT, RANK="0", WORLD_SIZE="6")
    assert code == 2
    assert "world = tp · pp · cp · dp" in err
    assert "nearest legal: 4, 8" in err


def test_under_torchrun_dp_follows_from_the_world(job: Path) -> None:
    """And rank 0 speaks for all."""
    code, out, err = run("train", job, "--tp", "2", "--dry-run", "--json", RANK="0", WORLD_SIZE="4")
    assert code == 0, err
    assert json.loads(out)["job"]["parallel"]["dp"] == 2
    assert run("train", job, "--tp", "2", "--dry-run", RANK="1", WORLD_SIZE="4") == (0, "", "")


def test_more_ranks_than_this_machine_starts(job: Path) -> None:
    code, _, err = run("train", job, "--batch.global_batch", "4096", "--dp", "4096")
    assert code == 2
    assert "world = 4096" in err
    assert not (job.parent / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data.corpus", '["/nowhere/at/all"]'], "/nowhere/at/all"),
        (["--tp", "3"], "must divide model.heads = 4"),
        (["--parallel.tq", "2"], "parallel.tp"),
        (["--steps", "2.5"], "2.5"),
        (["--run.out", "/dev/null/x"], "run.out = /dev/null/x"),
        (["--data.validation_fraction", "0"], "run.validate_every = 2"),
        (["--batch.sequence", "64", "--data.validation_fraction", "0.02"], "data.validation_fraction"),
    ],
)
def test_mistakes_are_told_before_anything_starts(job: Path, arguments: list[str], told: str) -> None:
    code, out, err = run("train", job, *arguments)
    assert code == 2
    assert told in err
    assert "Traceback" not in err
    assert not out
    assert not (job.parent / "runs").exists()


def test_dry_run_starts_nothing(job: Path) -> None:
    code, out, err = run("train", job, *LAYOUT, "--dp", "2", "--dry-run")
    assert code == 0, err
    assert "# dp 1  pp 0  tp [4 5]" in out
    resolved = job.parent / "resolved.toml"
    resolved.write_text(out)
    assert load_job(resolved) == load_job(job, [*LAYOUT, "--dp", "2"])
    assert not (job.parent / "runs").exists()
