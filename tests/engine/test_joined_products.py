"""Weights that multiply the same input are one product wherever they lie one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.jobs import named, small_job
from torch.utils._python_dispatch import TorchDispatchMode

from trigrid.check.parity import batch, share
from trigrid.engine.comm import Comm
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.spec.job import Job

PRODUCTS = ("mm", "addmm")


class Products(TorchDispatchMode):
    """Counts products of two matrices; placed: those that are written to storages that were there before."""

    count = placed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in PRODUCTS:
            self.count += 1
            self.placed += "out" in kwargs
        return func(*args, **kwargs)


def products_of_a_step(job: Job) -> Products:
    """For one microbatch."""
    engine = build_engine(job, Comm(grid_of(job), 0), torch.device("cpu"))
    tokens, labels = (share(rows, job, 0) for rows in batch(job, 0))
    with Products() as products:
        engine.accumulate(tokens, labels)
    return products


@pytest.mark.parametrize(
    ("model", "frozen", "forward", "backward"),
    [
        ({}, (), 4, 8),
        ({"qkv_bias": True, "qk_norm": True}, (), 4, 8),
        ({"block": "gpt", "kv_heads": 8}, (), 4, 8),
        # Not in the same bucket.
        ({}, ("*.q.weight",), 6, 6 + 5),
        ({"qkv_bias": True}, ("*.k.bias",), 6, 12),
        # All of them are.
        ({}, ("*.gate.weight", "*.up.weight"), 4, 4 + 3),
    ],
    ids=str,
)
def test_a_block_has_as_few_products_as_it_can(
    model: dict[str, object], frozen: tuple[str, ...], forward: int, backward: int
) -> None:
    job = small_job(named("tp1"), **model)
    job = replace(one_microbatch(job), optimizer=replace(job.optimizer, frozen=frozen))
    head = 3
    assert products_of_a_step(job).count == job.model.layers * (forward + backward) + head


@pytest.mark.parametrize(("precision", "placed"), [("fp32", 4), ("fp64", 4), ("bf16", 0)])
def test_a_weights_gradient_is_written_where_it_stays(precision: str, placed: int) -> None:
    """Where that has the format of the product."""
    job = one_microbatch(small_job(named("tp1"), precision=precision))
    assert products_of_a_step(job).placed == (job.model.layers * placed + 1 if placed else 0)


def one_microbatch(job: Job) -> Job:
    return replace(job, batch=replace(job.batch, micro_batch=job.batch.global_batch))
