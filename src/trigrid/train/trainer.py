"""The training loop, and what one rank does from joining the others to the summary."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from trigrid.blueprint.flops import train_flops_per_token
from trigrid.data.loader import Loader, TokenDataset
from trigrid.data.prepare import Prepared, load, prepare, save
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.engine.zero import TORCH_DTYPE
from trigrid.errors import Problem, Refused, RunFailed
from trigrid.grid import grid_of
from trigrid.job import dump_job
from trigrid.launch.place import RUN_DIR_VARIABLE, Place
from trigrid.models.build import build_engine
from trigrid.report.console import PhaseProgress, StepLine, duration, say
from trigrid.spec.job import Job
from trigrid.spec.precision import PRECISIONS
from trigrid.train.learning_rate import learning_rate
from trigrid.train.machine import matmul_flops_per_s, peak_memory_bytes
from trigrid.train.processes import choose_device, join

ETA_STEPS = 20


@dataclass(frozen=True)
class Summary:
    """The end of a run. Losses are means over tokens; validation_loss is the last one measured."""

    first_loss: float
    last_loss: float
    validation_loss: float | None
    steps: int
    tokens: int
    seconds: float
    run_dir: str


class Log:
    """metrics.jsonl and the console, on rank 0 only."""

    def __init__(self, run_dir: Path | None):
        self._file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8") if run_dir else None  # noqa: SIM115

    def write(self, kind: str, **values: object) -> None:
        if self._file:
            self._file.write(json.dumps({"kind": kind, "time_s": time.time(), **values}) + "\n")
            self._file.flush()

    def step(self, line: StepLine) -> None:
        self.write("step", **asdict(line))
        self.say(str(line))

    def say(self, line: str) -> None:
        if self._file:
            say(line)


def open_run(job: Job, name: str) -> Path:
    """Prepare the data, or find it prepared, and make the run's folder with `job.toml` and `data.json`."""
    with PhaseProgress() as progress:
        data = prepare(job.data, job.model.vocab, progress)
    run_dir = _new_run_dir(job, name)
    (run_dir / "job.toml").write_text(dump_job(job), encoding="utf-8")
    save(data, run_dir / "data.json")
    state = "found in the cache" if data.cached else "prepared"
    say(f"data {data.hash}: {data.train.tokens:,} tokens to train on, {state}; tokenizer {data.tokenizer}")
    return run_dir


def _new_run_dir(job: Job, name: str) -> Path:
    """A fresh folder under `job.run.out`, named by the job and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        run_dir = Path(job.run.out) / f"{name}-{stamp}{f'-{attempt}' if attempt else ''}"
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            reason = f"no folder for a run can be made here: {error.strerror}"
            raise Refused([Problem("run.out", job.run.out, reason)]) from None
        return run_dir
    raise RunFailed(f"no free name for a run in {job.run.out}")


def run_rank(job: Job, name: str, place: Place | None) -> Summary | None:
    """Everything one rank does; returns the summary on rank 0. `place` is None for a job of one process."""
    place = place or Place(0, 1, 0, 1, "127.0.0.1", 0, "none")
    device = choose_device(job, place.local_rank, place.local_world)
    given = os.environ.get(RUN_DIR_VARIABLE)
    made: Path | None = None
    if place.rank == 0:
        # Before joining: a collective that waited for the data to be prepared could run into its time limit.
        made = Path(given) if given else open_run(job, name)
    if place.world > 1:
        join(place, device)
    comm = Comm(grid_of(job), place.rank, device)
    run_dir = comm.gather_objects(made)[0]
    assert isinstance(run_dir, Path)
    engine = build_engine(job, comm, device)
    summary = _train(job, engine, load(run_dir / "data.json"), Log(run_dir if place.rank == 0 else None), run_dir)
    if place.world > 1:
        dist.destroy_process_group()
    return summary


def _train(job: Job, engine: Engine, data: Prepared, log: Log, run_dir: Path) -> Summary | None:
    run, layout, comm = job.run, job.parallel, engine.comm
    loader, held_out = _loaders(job, data)
    rate = _cluster_rate(job, engine)
    tokens_per_step = job.batch.global_batch * job.batch.sequence
    flops_per_token = train_flops_per_token(job.model, job.batch.sequence, causal=False)
    log.write("start", matmul_flops_per_s=rate, world=layout.world, data=data.hash)
    ranks = f"{layout.world} × {engine.device.type}"
    log.say(f"{ranks}: matrix products at {rate / 1e9:,.0f} GFLOP/s in all ({run.precision}), the measure of MFU")
    log.say(StepLine.HEADER)

    losses: list[float] = []
    validation_loss: float | None = None
    recent: deque[float] = deque(maxlen=ETA_STEPS)
    begun = time.perf_counter()
    for step in range(run.steps):
        started = time.perf_counter()
        tokens, labels = loader.batch(step, comm.coord.dp, layout.dp, job.batch.micro_batch)
        waited = time.perf_counter() - started
        rate_now = learning_rate(job.optimizer, step, run.steps)
        result = engine.step(tokens, labels, rate_now)
        if not result.updated:
            culprits = "; ".join(result.not_finite[:8])
            raise RunFailed(f"step {step + 1}: the gradient is not finite, no weight was changed ({culprits})")
        losses.append(result.loss)
        recent.append(time.perf_counter() - started)

        if (step + 1) % run.log_every == 0 or step + 1 == run.steps:
            worst = torch.tensor([float(peak_memory_bytes(engine.device)), waited], dtype=torch.float64)
            peak, wait = comm.read(comm.all_reduce(worst.to(engine.device), "world", "max"))
            tokens_per_s = tokens_per_step / recent[-1]
            log.step(
                StepLine(
                    step=step + 1,
                    steps=run.steps,
                    loss=result.loss,
                    gradient_norm=result.gradient_norm,
                    learning_rate=rate_now,
                    tokens_per_s=tokens_per_s,
                    flops_per_s=tokens_per_s * flops_per_token,
                    mfu=tokens_per_s * flops_per_token / rate,
                    peak_memory_bytes=int(peak),
                    data_wait_share=wait / recent[-1],
                    eta_s=(run.steps - step - 1) * median(recent),
                )
            )
        if held_out and ((step + 1) % run.validate_every == 0 or step + 1 == run.steps):
            validation_loss = _validate(job, engine, held_out)
            log.write("validation", step=step + 1, loss=validation_loss)
            log.say(f"{step + 1:>4}       validation loss {validation_loss:.4f}")

    seconds = time.perf_counter() - begun
    summary = Summary(
        losses[0], losses[-1], validation_loss, run.steps, run.steps * tokens_per_step, seconds, str(run_dir)
    )
    log.write("end", **asdict(summary))
    return summary if comm.rank == 0 else None


def _loaders(job: Job, data: Prepared) -> tuple[Loader, Loader | None]:
    """Of training and of held-out text; a set that is too small for one sample is told before the first step."""

    def loader(prefix: Path) -> Loader:
        return Loader(TokenDataset(prefix, job.batch.sequence), job.run.seed, job.batch.global_batch)

    validation = data.validation if job.run.validate_every else None
    return loader(data.train.prefix), loader(validation.prefix) if validation else None


def _validate(job: Job, engine: Engine, held_out: Loader) -> float:
    """Mean loss over the same few batches of held-out text each time."""
    coord, layout = engine.comm.coord, job.parallel
    batches = (held_out.batch(i, coord.dp, layout.dp, job.batch.micro_batch) for i in range(job.run.validation_batches))
    losses = [engine.evaluate(tokens, labels) for tokens, labels in batches]
    return math.fsum(losses) / len(losses)


def _cluster_rate(job: Job, engine: Engine) -> float:
    """Sum over ranks of their matmul rates, measured together."""
    dtype = TORCH_DTYPE[PRECISIONS[job.run.precision].compute]
    # Ranks that share cores must measure at the same time to measure their share.
    engine.comm.all_reduce(torch.zeros(1, device=engine.device), "world")
    mine = torch.tensor([matmul_flops_per_s(dtype, engine.device)], dtype=torch.float64, device=engine.device)
    return engine.comm.read(engine.comm.all_reduce(mine, "world"))[0]


def describe(summary: Summary) -> str:
    """The end of a run in words."""
    validation = "" if summary.validation_loss is None else f", validation loss {summary.validation_loss:.4f}"
    return (
        f"{summary.steps} steps, {summary.tokens:,} tokens in {duration(summary.seconds)}\n"
        f"training loss {summary.first_loss:.4f} → {summary.last_loss:.4f}{validation}\n"
        f"job, metrics and logs: {summary.run_dir}"
    )
