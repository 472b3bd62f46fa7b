"""What a block keeps for its backward, from the storages that are alive between its forward and its backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trigrid.check.census import PATIENCE_S
from trigrid.engine.comm import Comm
from trigrid.engine.units import Microbatch, RunUnit
from trigrid.engine.zero import TORCH_DTYPE
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.spec.job import Job
from trigrid.spec.precision import PRECISIONS


class Births(TorchDispatchMode):
    """Every storage that comes into being."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in before:
                storage = tensor.untyped_storage()
                self._seen.append((StorageWeakRef(storage), storage.nbytes()))
        return found

    def alive_bytes(self) -> int:
        """Of those that are alive now, each once."""
        return sum({ref.cdata: n for ref, n in self._seen if not ref.expired()}.values())


def kept_by_blocks(rank: int, cases: Sequence[tuple[Job, int]]) -> list[int]:
    """Bytes that the first block of each job keeps for one microbatch; waits a while for as many as the case says."""
    return [_kept(rank, job, wanted) for job, wanted in cases]


def _kept(rank: int, job: Job, wanted: int) -> int:
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    unit = next(unit for unit in engine.stages[0].units if unit.name == "layers.0")
    for bucket in unit.buckets:
        bucket.open()
    rows, sequence = job.batch.micro_batch, job.batch.sequence
    tokens_SB = torch.zeros(sequence, rows, dtype=torch.int64)
    microbatch = Microbatch(tokens_SB, tokens_SB, torch.ones(()), None, torch.arange(rows))
    # The first time it makes the tables of rotary positions.
    _forward(unit, job, microbatch)
    unit._saved.clear()
    births = Births()
    with births:
        _forward(unit, job, microbatch)
    deadline = time.monotonic() + PATIENCE_S
    while births.alive_bytes() != wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    return births.alive_bytes()


def _forward(unit: RunUnit, job: Job, microbatch: Microbatch) -> None:
    sequence, rows = microbatch.tokens_SB.shape
    here = sequence // (job.parallel.tp if job.parallel.sequence_parallel else 1)
    dtype = TORCH_DTYPE[PRECISIONS[job.run.precision].compute]
    unit.forward(torch.randn(here, rows, job.model.hidden, dtype=dtype), 0, microbatch, True)


def queued_by_block(rank: int, job: Job) -> int:
    """Bytes that the first block's input backward leaves for its weight backward, products' only."""
    comm = Comm(grid_of(job), rank)
    engine = build_engine(job, comm, torch.device("cpu"))
    units = (unit for stage in engine.stages.values() for unit in stage.units)
    unit = next(unit for unit in units if unit.name.startswith("layers."))
    for bucket in unit.buckets:
        bucket.open()
    tokens_SB = torch.zeros(job.batch.sequence, job.batch.micro_batch, dtype=torch.int64)
    _forward(unit, job, Microbatch(tokens_SB, tokens_SB, torch.ones(())))
    saved = unit._saved[0].x
    unit.input_backward(torch.randn_like(saved), 0)
    tensors = [t for item in unit._later[0].factors for t in (item.x, *item.grads)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
