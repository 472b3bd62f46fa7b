"""Small jobs that show what can go wrong: grouped queries, odd vocabulary, clipping, ignored labels, accumulation."""

from __future__ import annotations

from dataclasses import replace

from trigrid.spec.job import Batch, Job, Optimizer, Run
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec


def small_job(layout: Layout, *, precision: str = "fp64", **model: object) -> Job:
    """Six layers, eight heads over two KV heads, a vocabulary of 61; eight sequences a step, clipped at a norm of 0.5.

    Each rank accumulates over two microbatches or more, but for dp = 8, where it has one.
    """
    spec = ModelSpec(name="small", hidden=32, layers=6, heads=8, kv_heads=2, head_dim=8, ffn=48, vocab=61, context=64)
    return Job(
        model=replace(spec, **model),  # type: ignore[arg-type]
        batch=Batch(global_batch=8, sequence=16, micro_batch=2 if layout.dp <= 2 else 1),
        run=Run(steps=10, precision=precision),  # type: ignore[arg-type]
        optimizer=Optimizer(lr=1e-2, clip_norm=0.5),
        parallel=layout,
    )


def named(name: str, **fields: object) -> Layout:
    """A layout from its degrees, such as "tp2pp2dp2"."""
    from trigrid.check.matrix import NAMED

    degrees = {axis: int(degree) for axis, degree in NAMED.findall(name)}
    return Layout(**{"sequence_parallel": False, **degrees, **fields})  # type: ignore[arg-type]


def frozen(job: Job) -> Job:
    """`job` without training of the embedding, of one layer, and of the norms of another."""
    return replace(job, optimizer=replace(job.optimizer, frozen=("embedding.*", "layers.0.*", "layers.2.*norm*")))
