"""Collectives as operators of torch, which a compiler puts into its graph as they are: counted, timed and watched when
they run, not when they are traced."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._ops import OpOverload

from trigrid.engine.comm import Collectives, Comm, Group

# An operator takes tensors, numbers and words alone, so it names its Comm by a number.
_COMMS: WeakValueDictionary[int, Comm] = WeakValueDictionary()
_NUMBERS = count()
_LIBRARY = torch.library.Library("trigrid", "DEF")  # type: ignore[no-untyped-call]


def _operator(signature: str, run: Callable[..., Tensor], shape: Callable[..., Tensor]) -> OpOverload[..., Tensor]:
    """An operator that does `run`, and makes a tensor such as `shape` does."""
    name = signature.partition("(")[0]
    _LIBRARY.define(signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"trigrid::{name}", shape, lib=_LIBRARY)
    operator: OpOverload[..., Tensor] = getattr(torch.ops.trigrid, name).default
    return operator


def _all_reduce(x: Tensor, comm: int, axis: str, op: Literal["sum", "max"]) -> Tensor:
    if op == "sum":
        return _COMMS[comm].summed(x, axis)
    return _COMMS[comm].all_reduce(x.clone(memory_format=torch.contiguous_format), axis, op)


def _all_gather(x: Tensor, comm: int, axis: str) -> Tensor:
    return _COMMS[comm].all_gather(x, axis)


def _reduce_scatter(x: Tensor, comm: int, axis: str) -> Tensor:
    return _COMMS[comm].reduce_scatter(x, axis)


def _size(comm: int, axis: str) -> int:
    return _COMMS[comm].group(axis).size


ALL_REDUCE = _operator(
    "all_reduce(Tensor x, int comm, str axis, str op) -> Tensor",
    _all_reduce,
    lambda x, comm, axis, op: torch.empty_like(x, memory_format=torch.contiguous_format),
)
ALL_GATHER = _operator(
    "all_gather(Tensor x, int comm, str axis) -> Tensor",
    _all_gather,
    lambda x, comm, axis: x.new_empty((x.shape[0] * _size(comm, axis), *x.shape[1:])),
)
REDUCE_SCATTER = _operator(
    "reduce_scatter(Tensor x, int comm, str axis) -> Tensor",
    _reduce_scatter,
    lambda x, comm, axis: x.new_empty((x.shape[0] // _size(comm, axis), *x.shape[1:])),
)


class TracedComm(Collectives):
    """The collectives of `comm`, in graphs. None of them changes what it is given."""

    def __init__(self, comm: Comm):
        self._comm = comm
        self._number = next(_NUMBERS)
        _COMMS[self._number] = comm

    def group(self, axis: str) -> Group:
        return self._comm.group(axis)

    def all_reduce(self, tensor: Tensor, axis: str, op: Literal["sum", "max"] = "sum") -> Tensor:
        return ALL_REDUCE(tensor, self._number, axis, op)

    def summed(self, tensor: Tensor, axis: str) -> Tensor:
        return self.all_reduce(tensor, axis)

    def all_gather(self, shard: Tensor, axis: str) -> Tensor:
        return ALL_GATHER(shard, self._number, axis)

    def reduce_scatter(self, full: Tensor, axis: str) -> Tensor:
        return REDUCE_SCATTER(full, self._number, axis)
