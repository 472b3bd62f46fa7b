"""Starting trigrid as a user does, and looking at its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

[parallel]
sequence_parallel = false

[batch]
sequence = 32
global_batch = 8

[optimizer]
lr = 3e-3

[data]
corpus = ["{corpus}"]
cache = "{cache}"
validation_fraction = 0.2

[run]
steps = 4
precision = "fp64"
device = "cpu"
out = "{out}"
validate_every = 2
validation_batches = 1
"""


def write_job(folder: Path) -> Path:
    """A job on a small corpus of its own."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(40):
        words = " ".join(f"word{(i * 7 + j * j) % 97} goes to house{j % 13}" for j in range(60))
        (corpus / f"{i}.txt").write_text(words, encoding="utf-8")
    job = folder / "job.toml"
    job.write_text(JOB.format(corpus=corpus, cache=folder / "cache", out=folder / "runs"), encoding="utf-8")
    return job


def start(*arguments: object, launcher: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
    """`trigrid ARGUMENTS`, under `launcher` (a module and its arguments), without what a launcher around the tests may
    have set."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    before = ["-m", *launcher] if launcher else []
    return subprocess.Popen(
        [sys.executable, *before, "-m", "trigrid", *map(str, arguments)],
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: object, **env: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `trigrid ARGUMENTS`."""
    process = start(*arguments, **env)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out, err


def ranks_of(job: Path) -> dict[int, int]:
    """Rank → process id of the ranks that run `job` now."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(job) in (folder / "cmdline").read_text():
                variables = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
                if "RANK" in variables:
                    found[int(variables["RANK"])] = int(folder.name)
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """The first true value of `condition`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"still not true after {timeout_s:.0f} s")


def run_dir(job: Path) -> Path:
    """The folder of the only run of `job`."""
    (folder,) = (job.parent / "runs").iterdir()
    return folder


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]
