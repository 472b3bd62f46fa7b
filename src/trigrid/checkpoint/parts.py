"""What of a model and its optimizer one rank holds, as boxes of global tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trigrid.blueprint.boxes import Piece, pieces, written
from trigrid.checkpoint.manifest import Kind
from trigrid.engine.runtime import Engine
from trigrid.engine.zero import Bucket


@dataclass(frozen=True)
class Part:
    """The box of `kind` of parameter `name`, of global `shape`, from `offsets` on, which `values` are; on its device,
    and a view of what the engine trains."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor

    @property
    def key(self) -> str:
        """Of the whole tensor."""
        return key_of(self.name, self.kind)


def key_of(name: str, kind: Kind) -> str:
    """How a tensor is called where it is one of all tensors of a checkpoint."""
    return f"{kind}/{name}"


def entry_name(key: str, offsets: Sequence[int]) -> str:
    """How the box of a tensor is called in its file."""
    return f"{key}@{','.join(map(str, offsets))}"


def parts_written(engine: Engine) -> list[Part]:
    """What this rank writes: over all ranks, each element of each tensor once, shared evenly among its
    holders."""
    shard, replica, pp = engine.comm.group("zero"), engine.comm.group("replicate"), engine.comm.coord.pp
    return [
        part
        for name, bucket in engine.buckets.items()
        for piece in written(bucket.layout, pp, shard.index, replica.index, replica.size)
        for part in _parts(engine, name, bucket, piece)
    ]


def parts_held(engine: Engine) -> list[Part]:
    """What this rank's optimizer holds and must read; full weights follow from it."""
    return [
        part
        for name, bucket in engine.buckets.items()
        for piece in pieces(bucket.layout, *bucket.held)
        for part in _parts(engine, name, bucket, piece)
    ]


def _parts(engine: Engine, name: str, bucket: Bucket, piece: Piece) -> Iterator[Part]:
    flat: dict[Kind, Tensor] = {"weight": bucket.master}
    if not bucket.frozen:
        flat["mean"], flat["square"] = engine.optimizer.moments[name]
    for kind, values in flat.items():
        at = values.storage_offset() + piece.start - bucket.held[0]
        view = values.as_strided(piece.sizes, piece.strides, at)
        yield Part(piece.parameter.name, kind, piece.parameter.shape, piece.offsets, view)


def snapshot(parts: list[Part], before: list[Part] | None) -> list[Part]:
    """Copies of `parts` in host memory, in the buffers of `before` where there is an earlier snapshot of the same."""
    cuda = any(part.values.is_cuda for part in parts)
    copies = before if before is not None else _buffers(parts, cuda)
    for copy, part in zip(copies, parts, strict=True):
        copy.values.copy_(part.values, non_blocking=True)
    if cuda:
        torch.cuda.current_stream().synchronize()
    return copies


def _buffers(parts: list[Part], pinned: bool) -> list[Part]:
    """Room for copies: one array for each number format, since pinned memory is given out in powers of two."""
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for part in parts:
        sizes[part.values.dtype] += part.values.numel()
    left = {dtype: torch.empty(numel, dtype=dtype, pin_memory=pinned) for dtype, numel in sizes.items()}
    copies = []
    for part in parts:
        dtype, numel = part.values.dtype, part.values.numel()
        room, left[dtype] = left[dtype][:numel], left[dtype][numel:]
        copies.append(replace(part, values=room.view(part.values.shape)))
    return copies
