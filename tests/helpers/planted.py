"""Bugs to plant into the engine, each one that has been seen in this field. Parity must catch every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from trigrid.engine import tensor, zero
from trigrid.engine.again import with_graph
from trigrid.engine.comm import Comm
from trigrid.engine.zero import Bucket

all_reduce = Comm.all_reduce
held_runs = Bucket.held_runs
shifted = zero._shifted


@contextmanager
def norms_not_summed_over_tp() -> Iterator[None]:
    """Gradients that are partial over TP stay partial (Megatron-LM#1446)."""

    with patch.object(Bucket, "held_runs", _without_sums_over("tp")):
        yield


@contextmanager
def tied_gradient_added_twice() -> Iterator[None]:
    def reduce(self: Comm, tensor: Tensor, axis: str, op: Any = "sum") -> Tensor:
        all_reduce(self, tensor, axis, op)
        return all_reduce(self, tensor, axis, op) if axis == "tied" else tensor

    with patch.object(Comm, "all_reduce", reduce):
        yield


@contextmanager
def mean_of_means() -> Iterator[None]:
    """Each data-parallel rank divides by its own number of valid tokens (transformers#34373)."""

    def reduce(self: Comm, tensor: Tensor, axis: str, op: Any = "sum") -> Tensor:
        return tensor * self.group("batch").size if axis == "batch" else all_reduce(self, tensor, axis, op)

    with patch.object(Comm, "all_reduce", reduce):
        yield


@contextmanager
def bucket_boundary_off_by_one() -> Iterator[None]:
    """The optimizer's stretches of a shard begin one element late."""

    def runs(all_runs: Any, start: int, stop: int) -> Any:
        return tuple(
            replace(run, start=run.start + 1) for run in shifted(all_runs, start, stop) if run.stop - run.start > 1
        )

    with patch.object(zero, "_shifted", runs):
        yield


@contextmanager
def kv_gradients_not_summed() -> Iterator[None]:
    """TP ranks that hold the same KV head keep their own part of its gradient."""

    with patch.object(Bucket, "held_runs", _without_sums_over("kv")):
        yield


@contextmanager
def made_again_otherwise() -> Iterator[None]:
    """The input of a product that backward makes again is a little larger than it was."""

    def wrong(how: Any, inputs: Any, needed: Any) -> Any:
        return with_graph(lambda *tensors: how(*tensors) * 1.001, inputs, needed)

    with patch.object(tensor, "with_graph", wrong):
        yield


@contextmanager
def the_other_backend() -> Iterator[None]:
    """No bug: the paths that NCCL takes (a group for each channel, its own reduce-scatter, the first use of each), on
    gloo."""
    with patch.object(dist, "get_backend", lambda *_: "nccl"):
        yield


def _without_sums_over(axis: str) -> Any:
    def runs(self: Bucket) -> Any:
        return tuple(replace(run, sum_group="none") if run.sum_group == axis else run for run in held_runs(self))

    return runs
