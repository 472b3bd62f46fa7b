"""What a dry run has in place of a network: the same communication, without peers and without values, that tells a
tracer what its tensors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from trigrid.check.tracing import COLLECTIVES, GATHERED, MESSAGES, REDUCED, WHOLE, Tracer
from trigrid.engine.activity import Activity
from trigrid.engine.comm import Comm, Pending, Traffic, Transfer
from trigrid.engine.runtime import Engine
from trigrid.engine.units import RunUnit
from trigrid.engine.zero import Bucket
from trigrid.grid import Grid
from trigrid.schedule import Action


class DryComm(Comm):
    """Values read on the host do not exist in a dry run; zeros stand for a finite gradient that is not clipped."""

    def __init__(self, grid: Grid, rank: int, tracer: Tracer):
        super().__init__(grid, rank)
        self._tracer = tracer
        self.activity = _Acting(tracer)
        self.traffic = _Messages(tracer)

    def read(self, tensor: Tensor) -> list[float]:
        return [0.0] * tensor.numel()

    def all_reduce_start(self, tensor: Tensor, axis: str, op: Literal["sum", "max"] = "sum") -> Pending:
        self._tracer.label(tensor, REDUCED if axis in ("zero", "replicate") else COLLECTIVES)
        return super().all_reduce_start(tensor, axis, op)

    def all_gather_start(self, shard: Tensor, axis: str) -> Pending:
        pending = super().all_gather_start(shard, axis)
        self._tracer.label(pending.arriving(), GATHERED if axis == "zero" else COLLECTIVES)
        return pending

    def reduce_scatter_start(self, full: Tensor, axis: str) -> Pending:
        pending = super().reduce_scatter_start(full, axis)
        self._tracer.label(pending.arriving(), REDUCED if axis == "zero" else COLLECTIVES)
        return pending


class _Acting(Activity):
    __slots__ = ("_tracer",)

    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer

    def act(self, action: object) -> None:
        super().act(action)
        self._tracer.act(action if isinstance(action, Action) else str(action))


class _Messages(Traffic):
    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer

    def add(self, transfer: Transfer, tensor: Tensor) -> None:
        super().add(transfer, tensor)
        if transfer.kind in ("send", "receive"):
            self._tracer.label(tensor, MESSAGES)


def attach(tracer: Tracer, engine: Engine) -> None:
    """Tell `tracer` what belongs to which unit, and what gradients of a unit are while they are whole."""
    for stage in engine.stages.values():
        for unit in stage.units:
            _watch_unit(tracer, unit)
    for bucket in engine.buckets.values():
        _watch_bucket(tracer, bucket)


def _watch_unit(tracer: Tracer, unit: RunUnit) -> None:
    def starting(method: Callable[..., Any]) -> Callable[..., Any]:
        def started(x: Tensor, *rest: object) -> Any:
            tracer.taken(x, unit.name)
            with tracer.within(unit.name):
                return method(x, *rest)

        return started

    def alone(method: Callable[[int], None]) -> Callable[[int], None]:
        def worked(index: int) -> None:
            with tracer.within(unit.name):
                method(index)

        return worked

    unit.forward = starting(unit.forward)  # type: ignore[method-assign]
    unit.backward = starting(unit.backward)  # type: ignore[method-assign]
    unit.input_backward = starting(unit.input_backward)  # type: ignore[method-assign]
    unit.weight_backward = alone(unit.weight_backward)  # type: ignore[assignment, method-assign]


def _watch_bucket(tracer: Tracer, bucket: Bucket) -> None:
    open_gradients = bucket.open_gradients

    def opened() -> None:
        with tracer.labelled(WHOLE):
            open_gradients()

    bucket.open_gradients = opened  # type: ignore[method-assign]


def label_state(tracer: Tracer, engine: Engine) -> None:
    """Between two steps: what is state. Where a storage serves two purposes it is the first, as in `live_bytes`."""
    for name, bucket in engine.buckets.items():
        tracer.label(bucket.weights, "weights")
        tracer.label(bucket.master, "master")
        tracer.label(bucket._gradients, "gradients")
        for moment in engine.optimizer.moments.get(name, ()):
            tracer.label(moment, "optimizer")
