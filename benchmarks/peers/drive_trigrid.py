"""trigrid's own engine, built as `trigrid train` builds it.

What differs from `trigrid train`: weights and tokens are those of all contestants, and weight decay is on norms too.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from common import LAYOUTS, MATMUL, RANK, WORKLOAD, WORLD, Turns, microbatches, reference_weights

import trigrid
from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.grid import grid_of
from trigrid.job import job_from_text
from trigrid.models.build import build_engine
from trigrid.models.huggingface import places
from trigrid.spec.job import Job

JOB = """\
[model]
name = "benchmark"
hidden = {w.hidden}
layers = {w.layers}
heads = {w.heads}
kv_heads = {w.kv_heads}
head_dim = {w.head_dim}
ffn = {w.ffn}
vocab = {w.vocab}
context = {w.sequence}
rope_theta = {w.rope_theta}
norm_eps = {w.norm_eps}
[batch]
sequence = {w.sequence}
global_batch = {w.global_batch}
micro_batch = {cut.micro_batch}
[parallel]
dp = {cut.dp}
tp = {cut.tp}
pp = {cut.pp}
zero = {cut.zero}
sequence_parallel = false
[optimizer]
lr = {w.lr}
beta1 = {w.beta1}
beta2 = {w.beta2}
eps = {w.eps}
weight_decay = {w.weight_decay}
clip_norm = 0.0
[cluster]
gpus_per_node = {cut.world}
[run]
steps = 1
precision = "fp32"
matmul_precision = "{matmul}"
device = "cpu"
"""


def engine_of(job: Job) -> Engine:
    """The engine with the weights of all contestants."""
    where, weights = places(job.model), reference_weights()

    def initialise(local: LocalParameter) -> torch.Tensor:
        whole = weights[where[local.parameter.name].tensor]
        return whole[tuple(slice(start, stop) for start, stop in local.box)]

    engine = build_engine(job, Comm(grid_of(job), RANK), torch.device("cpu"), initialise)
    for group in engine.optimizer._adamw.param_groups:
        group["weight_decay"] = WORKLOAD.weight_decay
    return engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="single", choices=LAYOUTS)
    cut = LAYOUTS[parser.parse_args().layout]
    turns = Turns(trigrid.__version__, f"zero = {cut.zero}" + (", sequence_parallel = false" if cut.tp > 1 else ""))
    if WORLD > 1:
        dist.init_process_group("gloo")
    job = job_from_text(JOB.format(w=WORKLOAD, cut=cut, matmul=MATMUL))
    engine = engine_of(job)
    turns.ready(sum((b.master if b.policy.shard_weights else b.weights).numel() for b in engine.buckets.values()))
    for step in turns:
        rows = microbatches(step, engine.comm.coord.dp, cut)
        tokens, labels = (torch.stack(part) for part in zip(*rows, strict=True))
        with turns.timed():
            result = engine.step(tokens, labels, WORKLOAD.lr, consumed=(step - 1) * WORKLOAD.global_batch)
        turns.loss(result.loss)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
