"""The shape of a step, which every rank must expect alike: a message of another size than its receiver's buffer ends a
process or never arrives."""

from __future__ import annotations

import torch

from trigrid.engine.comm import Comm
from trigrid.errors import RunFailed


def agree_on_shape(shape_MBS: tuple[int, ...], comm: Comm, device: torch.device) -> None:
    """Raise RunFailed on every rank, naming pipeline ranks, where ranks have another number of microbatches, rows or
    tokens than the first rank. Every rank of the world must call it."""
    mine = torch.tensor(shape_MBS, dtype=torch.int64, device=device)
    # The largest and the smallest in one call: they are equal where all are.
    ends = comm.read(comm.all_reduce(torch.cat([mine, -mine]), "world", "max"))
    if ends[:3] == [-end for end in ends[3:]]:
        return
    shapes = comm.gather_objects(tuple(shape_MBS))
    differ = [
        f"pipeline rank {comm.grid.coord(rank).pp} (rank {rank}) got {_words(shape)}"
        for rank, shape in enumerate(shapes)
        if shape != shapes[0]
    ]
    raise RunFailed(
        f"ranks have batches of different shapes: pipeline rank {comm.grid.coord(0).pp} (rank 0) expected "
        f"{_words(shapes[0])}, {'; '.join(differ[:8])}"
    )


def _words(shape: object) -> str:
    assert isinstance(shape, tuple)
    microbatches, rows, sequence = shape
    return f"{microbatches} microbatches of {rows} × {sequence} tokens"
