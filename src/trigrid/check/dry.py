"""Communication that tells a tracer what its tensors are; without peers and without values it is what a dry run has in
place of a network."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from trigrid.check.census import PATIENCE_S
from trigrid.check.tracing import COLLECTIVES, GATHERED, MESSAGES, REDUCED, WHOLE, Tracer
from trigrid.engine.activity import Activity
from trigrid.engine.comm import Comm, Pending, Traffic, Transfer
from trigrid.engine.runtime import Engine
from trigrid.engine.units import RunUnit
from trigrid.engine.zero import Bucket
from trigrid.grid import Grid
from trigrid.schedule import Action


class TracedComm(Comm):
    """Tells a tracer what it sends, receives and gathers."""

    def __init__(self, grid: Grid, rank: int, tracer: Tracer):
        super().__init__(grid, rank)
        self._tracer = tracer
        self.activity = _Acting(tracer)
        self.traffic = _Messages(tracer)

    def all_reduce_start(self, tensor: Tensor, axis: str, op: Literal["sum", "max"] = "sum") -> Pending:
        self._tracer.label(tensor, REDUCED if axis in ("zero", "replicate") else COLLECTIVES)
        return super().all_reduce_start(tensor, axis, op)

    def summed_start(self, tensor: Tensor, axis: str) -> Pending:
        pending = super().summed_start(tensor, axis)
        self._tracer.label(pending.arriving, COLLECTIVES)
        return pending

    def all_gather_start(self, shard: Tensor, axis: str) -> Pending:
        pending = super().all_gather_start(shard, axis)
        self._tracer.label(pending.arriving, GATHERED if axis == "zero" else COLLECTIVES)
        return pending

    def reduce_scatter_start(self, full: Tensor, axis: str) -> Pending:
        pending = super().reduce_scatter_start(full, axis)
        self._tracer.label(pending.arriving, REDUCED if axis == "zero" else COLLECTIVES)
        return pending


class PeerComm(TracedComm):
    """Among peers. A collective is over when no other thread holds its tensors any more."""

    def all_reduce_start(self, tensor: Tensor, axis: str, op: Literal["sum", "max"] = "sum") -> Pending:
        held = _Held(tensor)
        return _Settled(super().all_reduce_start(tensor, axis, op), held)

    def summed_start(self, tensor: Tensor, axis: str) -> Pending:
        held = _Held(tensor)
        return _Settled(super().summed_start(tensor, axis), held)

    def all_gather_start(self, shard: Tensor, axis: str) -> Pending:
        held = _Held(shard)
        return _Settled(super().all_gather_start(shard, axis), held)

    def reduce_scatter_start(self, full: Tensor, axis: str) -> Pending:
        held = _Held(full)
        return _Settled(super().reduce_scatter_start(full, axis), held)


class _Held:
    """A tensor and how many hold it before a collective reads it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.count = _holders(tensor)

    @property
    def settled(self) -> bool:
        return _holders(self.tensor) <= self.count


class _Settled(Pending):
    """Gloo's threads let go of tensors a moment after a collective is over, when another may have been made already."""

    def __init__(self, pending: Pending, sent: _Held):
        super().__init__((), pending.arriving)
        self._pending = pending
        self._held: _Held | None = sent

    def wait(self) -> Tensor:
        result = self._pending.wait()
        deadline = time.monotonic() + PATIENCE_S
        while self._held and not self._over(self._held) and time.monotonic() < deadline:
            time.sleep(0)
        self._held = None
        return result

    def _over(self, sent: _Held) -> bool:
        # Nobody else knows what arrives, unless it is what was sent.
        return sent.settled and (self.arriving is sent.tensor or _holders(self.arriving) == 1)


def _holders(tensor: Tensor) -> int:
    """References to `tensor` in C++, of which all of Python's count as one."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


class DryComm(TracedComm):
    """Without peers, running the program of the backend that it stands for. Values read on the host do not exist;
    zeros stand for a finite gradient that is not clipped."""

    def __init__(self, grid: Grid, rank: int, tracer: Tracer, stands_for: str):
        self._stands_for = stands_for
        super().__init__(grid, rank, tracer)

    def backend(self) -> str:
        return self._stands_for

    def read(self, tensor: Tensor) -> list[float]:
        return [0.0] * tensor.numel()


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
