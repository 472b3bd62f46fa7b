"""What checkpoints cost: step time with and without them, in turn, and rates beside the disk's own.

    python benchmarks/checkpoint.py [--pairs 12] [--folder DIR]

A Llama of 27 million parameters in fp32 on one process with one thread, so that the thread which writes has a core of
its own, as it has beside a GPU. A stretch is ten steps; every other one begins with a checkpoint, written in the
background. Each pair of stretches gives a ratio. Then checkpoints by themselves: bytes per second of writing one (to
the disk, fsync and digests included), of verifying it and of reading it into the engine, beside a plain write and read
of as many bytes. It needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from trigrid.checkpoint.folder import checkpoints
from trigrid.checkpoint.manifest import State, read_manifest
from trigrid.checkpoint.restore import find_sound, load
from trigrid.checkpoint.saver import Saver
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.grid import grid_of
from trigrid.job import job_from_text
from trigrid.models.build import build_engine

JOB = """\
[model]
name = "bench"
vocab = 8192
hidden = 512
layers = 6
heads = 8
kv_heads = 8
head_dim = 64
ffn = 1408
context = 256

[batch]
sequence = 64
global_batch = 4
micro_batch = 4

[run]
steps = 10
precision = "fp32"
device = "cpu"

[checkpoint]
keep = 1
"""
STEPS = 10
BLOCK_BYTES = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    job = job_from_text(JOB)
    engine = build_engine(job, Comm(grid_of(job), 0), torch.device("cpu"))
    tokens = torch.randint(0, job.model.vocab, (1, 4, 64))
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        _pairs(engine, tokens, Path(folder), asked.pairs)
        _rates(engine, Path(folder))


def _pairs(engine: Engine, tokens: torch.Tensor, run_dir: Path, pairs: int) -> None:
    saver = Saver(engine, run_dir, None)
    number = 0

    def stretch(saves: bool) -> float:
        nonlocal number
        begun_s = time.perf_counter()
        for step in range(STEPS):
            number += 1
            engine.step(tokens, tokens, 1e-4)
            if saves and step == 0:
                saver.save(State(number))
        took_s = time.perf_counter() - begun_s
        # What is still being written must not weigh on the stretch without.
        saver.finish()
        return took_s

    stretch(True)
    ratios, plain = [], []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        times = {saves: stretch(saves) for saves in order}
        ratios.append(times[True] / times[False])
        plain.append(times[False] / STEPS)
        print(
            f"pair {pair + 1}: {times[False] / STEPS * 1e3:,.0f} ms a step, with checkpoints × {ratios[-1]:.3f}",
            flush=True,
        )
    saver.close()
    ratios.sort()
    print(
        f"a checkpoint every {STEPS} steps of {median(plain) * 1e3:,.0f} ms: × {median(ratios):.3f} "
        f"[{ratios[len(ratios) // 4]:.3f}, {ratios[-1 - len(ratios) // 4]:.3f}] of the time without (median, quartiles "
        f"of {pairs} pairs)"
    )


def _rates(engine: Engine, run_dir: Path) -> None:
    engine.job = replace(engine.job, checkpoint=replace(engine.job.checkpoint, background=False))
    saver = Saver(engine, run_dir, None)
    steps = iter(range(1_000_000, 2_000_000))
    write_s = _median(lambda: saver.save(State(next(steps))))
    saver.close()
    (path,) = checkpoints(run_dir)
    size = read_manifest(path).bytes
    verify_s = _median(lambda: find_sound(engine.comm, [path]))
    found, _ = find_sound(engine.comm, [path])
    assert found is not None
    read_s = _median(lambda: load(engine, found, None))
    raw = run_dir / "raw"
    content = os.urandom(BLOCK_BYTES)
    raw_write_s = _median(lambda: _write(raw, content, size))
    raw_read_s = _median(lambda: _read(raw))
    shutil.rmtree(path)
    print(f"a checkpoint of {size / 1e6:,.0f} MB, GB/s: ", end="")
    rates = {"written": write_s, "verified": verify_s, "read": read_s}
    print(", ".join(f"{name} {size / took_s / 1e9:.2f}" for name, took_s in rates.items()), end="; ")
    print(f"a plain file: written {size / raw_write_s / 1e9:.2f}, read from cache {size / raw_read_s / 1e9:.2f}")


def _median(act: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        begun_s = time.perf_counter()
        act()
        times.append(time.perf_counter() - begun_s)
    return median(times)


def _write(path: Path, block: bytes, size: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass


if __name__ == "__main__":
    main()
