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
    """Counts products of two matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))


def products_of_a_step(job: Job) -> int:
    """For one microbatch."""
    engine = build_engine(job, Comm(grid_of(job), 0), torch.device("cpu"))
    tokens, labels = (share(rows, job, 0) for rows in batch(job, 0))
    with Products() as products:
        engine.accumulate(tokens, labels)
    return products.count


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
    whole = replace(job.batch, micro_batch=job.batch.global_batch)
    job = replace(job, optimizer=replace(job.optimizer, frozen=frozen), batch=whole)
    head = 3
    assert products_of_a_step(job) == job.model.layers * (forward + backward) + head
