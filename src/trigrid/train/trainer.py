"""The training loop, and what one rank does from joining the others to the summary."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import trigrid
from trigrid.blueprint import decoder
from trigrid.blueprint.flops import train_flops_per_token
from trigrid.data.dataset import TokenDataset
from trigrid.data.loader import Batch, Loader, read_ahead
from trigrid.data.prepare import Prepared, TokenSet, load, prepare, save
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.engine.zero import TORCH_DTYPE
from trigrid.errors import Problem, Refused, RunFailed
from trigrid.grid import grid_of
from trigrid.job import dump_job
from trigrid.launch.place import RUN_DIR_VARIABLE, Place
from trigrid.models.build import build_engine
from trigrid.report.console import Console
from trigrid.report.log import Log
from trigrid.report.metrics import Facts, Summary
from trigrid.spec.job import Job
from trigrid.spec.precision import PRECISIONS
from trigrid.train.learning_rate import learning_rate
from trigrid.train.machine import matmul_flops_per_s
from trigrid.train.meter import Meter
from trigrid.train.processes import choose_device, join
from trigrid.train.timeline import start_recording, write_recording


def open_run(job: Job, name: str, console: Console) -> Path:
    """Prepare the data, or find it prepared, and make the run's folder with `job.toml` and `data.json`."""
    with console.progress() as progress:
        data = prepare(job.data, job.model.vocab, progress)
    # Before there is a run, and long before there is an engine.
    _loaders(job, data)
    run_dir = _new_run_dir(job, name)
    (run_dir / "job.toml").write_text(dump_job(job), encoding="utf-8")
    save(data, run_dir / "data.json")
    _tell_data(job, data, console)
    return run_dir


def _tell_data(job: Job, data: Prepared, console: Console) -> None:
    """Name the data, and say how often each part of it will be seen."""
    tokenizer = f"; tokenizer {data.tokenizer}" if data.tokenizer else ""
    console.say(f"data {data.hash}: {'found' if data.cached else 'prepared'}{tokenizer}")
    shares = _weights(job, data.train) or tuple(part.tokens for part in data.train)
    for part, share in zip(data.train, shares, strict=True):
        drawn = job.run.steps * job.batch.global_batch * job.batch.sequence * share / sum(shares)
        of = f"{share / sum(shares):.1%} of each batch, " if len(data.train) > 1 else ""
        console.say(
            f"  {part.name}: {part.tokens:,} tokens to train on, {of}{drawn / part.tokens:.2f} passes in this run"
        )


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


def run_rank(job: Job, name: str, place: Place | None, console: Console) -> Summary | None:
    """Everything one rank does; returns the summary on rank 0, the only one to speak on its `console`. `place` is None
    for a job of one process."""
    place = place or Place(0, 1, 0, 1, "127.0.0.1", 0, "none")
    first = place.rank == 0
    console = console if first else Console(quiet=True)
    device = choose_device(job, place.local_rank, place.local_world)
    given = os.environ.get(RUN_DIR_VARIABLE)
    made: Path | None = None
    if first:
        # Before joining: a collective that waited for the data to be prepared could run into its time limit.
        made = Path(given) if given else open_run(job, name, console)
    if place.world > 1:
        with console.waiting(f"joining {place.world} ranks"):
            join(place, device)
    comm = Comm(grid_of(job), place.rank, device)
    run_dir = comm.gather_objects(made)[0]
    assert isinstance(run_dir, Path)
    with console.waiting("building the engine"):
        engine = build_engine(job, comm, device)
    data = load(run_dir / "data.json")
    facts = _facts(job, engine, data)
    with Log(job, facts, run_dir, console) if first else nullcontext() as log:
        summary = _train(job, engine, data, log, run_dir)
    if place.world > 1:
        dist.destroy_process_group()
    return summary


def _train(job: Job, engine: Engine, data: Prepared, log: Log | None, run_dir: Path) -> Summary | None:
    run, coord, dp = job.run, engine.comm.coord, job.parallel.dp
    loader, held_out = _loaders(job, data)
    meter = Meter(engine.comm, engine.device)

    def read(step: int) -> Batch:
        return loader.batch(step * job.batch.global_batch, coord.dp, dp, job.batch.micro_batch)

    batches = read_ahead(read, range(run.steps), job.data.workers)
    for step in range(run.steps):
        last = step + 1 == run.steps
        if traced := step + 1 == run.trace_step:
            start_recording(engine)
        meter.begin()
        batch = next(batches)
        meter.loaded()
        rate = learning_rate(job.optimizer, step, run.steps)
        result = engine.step(batch.tokens, batch.labels, rate, batch.documents, step * job.batch.global_batch)
        step_s = meter.end()
        path = write_recording(engine, run_dir, step + 1) if traced else None
        if path and log:
            log.say(f"timeline of step {step + 1}: {path}")
        if not result.updated:
            culprits = "; ".join(result.not_finite[:8])
            raise RunFailed(f"step {step + 1}: the gradient is not finite, no weight was changed ({culprits})")
        if run.check_copies:
            _check_copies(engine, step + 1, rate, step * job.batch.global_batch)
        if log:
            log.advance(result.loss, step_s)
        if last or (step + 1) % run.log_every == 0:
            interval = meter.read()
            if log:
                log.step(result.gradient_norm, rate, interval)
        if held_out and (last or (step + 1) % run.validate_every == 0):
            validation_loss = _validate(job, engine, held_out, log)
            if log:
                log.validation(validation_loss)
    return log.end() if log else None


def _check_copies(engine: Engine, step: int, rate: float, consumed: int) -> None:
    """Raise RunFailed where ranks are not at the same step, rate and sample, or hold unequal copies of a weight."""
    places = engine.comm.gather_objects(f"step {step}, learning rate {rate!r}, {consumed} samples before it")
    if len(set(places)) > 1:
        told = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
        raise RunFailed(f"ranks are out of step: {told}")
    if differ := engine.disagreements():
        raise RunFailed(f"step {step}: copies of a weight differ: {'; '.join(differ[:8])}")


def _loaders(job: Job, data: Prepared) -> tuple[Loader, Loader | None]:
    """Of training and of held-out text. Raises Refused where a set is too small for one sample."""

    def loader(sets: Sequence[TokenSet]) -> Loader:
        sequence, vocab = job.batch.sequence, job.model.vocab
        return Loader(
            [TokenDataset(s.prefix, sequence, vocab, s.first_document, s.stop_document) for s in sets],
            weights=_weights(job, sets),
            seed=job.run.seed,
            global_batch=job.batch.global_batch,
            documents=job.data.document_attention,
        )

    training = loader(data.train)
    if not (job.run.validate_every and data.validation):
        return training, None
    try:
        return training, loader(data.validation)
    except Refused as refused:
        reason = "; ".join(f"too little text is held out: {problem.reason}" for problem in refused.problems)
        raise Refused([Problem("data.validation_fraction", job.data.validation_fraction, reason)]) from None


def _weights(job: Job, sets: Sequence[TokenSet]) -> tuple[float, ...]:
    return tuple(job.data.weights[part.entry] for part in sets) if job.data.weights else ()


def _validate(job: Job, engine: Engine, held_out: Loader, log: Log | None) -> float:
    """Mean loss over the same few batches of held-out text each time."""
    coord, layout = engine.comm.coord, job.parallel
    losses = []
    for number in range(job.run.validation_batches):
        batch = held_out.batch(number * job.batch.global_batch, coord.dp, layout.dp, job.batch.micro_batch)
        losses.append(engine.evaluate(batch.tokens, batch.labels, batch.documents))
        if log:
            log.validating(len(losses), job.run.validation_batches)
    return math.fsum(losses) / len(losses)


def _facts(job: Job, engine: Engine, data: Prepared) -> Facts:
    name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
    full, causal = (train_flops_per_token(job.model, job.batch.sequence, causal=causal) for causal in (False, True))
    return Facts(
        trigrid=trigrid.__version__,
        world=job.parallel.world,
        device=name,
        precision=job.run.precision,
        parameters=decoder(job.model).count,
        steps=job.run.steps,
        tokens_per_step=job.batch.global_batch * job.batch.sequence,
        flops_per_token_full=full,
        flops_per_token_causal=causal,
        matmul_flops_per_s=_cluster_rate(job, engine),
        data=data.hash,
    )


def _cluster_rate(job: Job, engine: Engine) -> float:
    """Sum over ranks of their matmul rates, measured together."""
    dtype = TORCH_DTYPE[PRECISIONS[job.run.precision].compute]
    # Ranks that share cores must measure at the same time to measure their share.
    engine.comm.all_reduce(torch.zeros(1, device=engine.device), "world")
    mine = torch.tensor([matmul_flops_per_s(dtype, engine.device)], dtype=torch.float64, device=engine.device)
    return engine.comm.read(engine.comm.all_reduce(mine, "world"))[0]
