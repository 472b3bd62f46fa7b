"""Initial values that are the same for every layout.

Each parameter is cut into blocks of consecutive global elements, and each block is drawn by a generator of its own,
seeded from (seed, name, block). A rank draws the blocks that its slice touches, whatever the layout.
"""

from __future__ import annotations

import hashlib
from math import prod

import torch
from torch import Tensor

from trigrid.blueprint.parameters import LocalParameter

BLOCK_NUMEL = 1 << 16
# Drawn at a time: enough blocks that those cut at both ends of a stretch cost little twice.
DRAW_NUMEL = 16 * BLOCK_NUMEL


def draw(local: LocalParameter, seed: int) -> Tensor:
    """The initial value of a local parameter: fp32 on the CPU, of shape `local.shape`, padding zero.

    Drawn in fp32 for every precision, so that all precisions start alike.
    """
    parameter = local.parameter
    out = torch.zeros(local.shape)
    inside = tuple(slice(0, stop - start) for start, stop in local.box)
    if parameter.std is None:
        out[inside] = parameter.fill
        return out
    (first, last), *rest = local.box
    columns = prod(parameter.shape[1:])
    if first == last or any(start == stop for start, stop in rest):
        return out
    rows_at_once = max(1, DRAW_NUMEL // columns)
    for row in range(first, last, rows_at_once):
        stop = min(row + rows_at_once, last)
        values = _flat(parameter.name, parameter.std, seed, row * columns, stop * columns)
        rows = values.view(stop - row, *parameter.shape[1:])
        wanted = rows[(slice(None), *(slice(*ends) for ends in rest))]
        out[(slice(row - first, stop - first), *inside[1:])] = wanted
    return out


def _flat(name: str, std: float, seed: int, start: int, stop: int) -> Tensor:
    """Elements start..stop of the flattened global parameter."""
    blocks = range(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
    drawn = torch.empty(len(blocks), BLOCK_NUMEL)
    for row, block in enumerate(blocks):
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn[row].normal_(0.0, std, generator=generator)
    offset = blocks.start * BLOCK_NUMEL
    return drawn.flatten()[start - offset : stop - offset]
