"""One parameter of the model: declared once, read by the planner, initialisation, synchronisation, norm and
checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from trigrid.spec.layout import Layout

SumGroup = Literal["none", "tp", "kv"]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A logical parameter with its global shape.

    role: its short name inside a unit. cut: the dimension that TP cuts (None: every TP rank holds all of it).
    pieces: indivisible parts along `cut` (heads; 0: rows, padded to a multiple of tp).
    partial: for a parameter that TP does not cut, whether each TP rank computes only part of its gradient
    ("always"), or does so only where activations are cut along the sequence ("sequence").
    std: standard deviation of the initial values; None: filled with `fill`.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    cut: int | None = None
    pieces: int = 0
    partial: Literal["always", "sequence"] = "sequence"
    decay: bool = True
    std: float | None = None
    fill: float = 0.0
    tied: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class LocalParameter:
    """The slice of a parameter that one TP rank holds.

    shape: of the local tensor; box: the (start, stop) of each global dimension that it covers, smaller than `shape`
    where the parameter is padded (padding stays zero). sum_group: the ranks over which gradients must be added.
    copies: TP ranks that hold the same box; owned: whether this rank stands for them in sums over the model.
    """

    parameter: Parameter
    shape: tuple[int, ...]
    box: Box
    sum_group: SumGroup
    copies: int
    owned: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


def localise(parameter: Parameter, layout: Layout, tp_rank: int) -> LocalParameter:
    """The slice of `parameter` on TP rank `tp_rank`.

    With fewer pieces than TP ranks (KV heads), tp ÷ pieces neighbouring ranks hold the same piece, and each computes
    the part of its gradient that comes from its own query heads.
    """
    tp, whole = layout.tp, tuple((0, n) for n in parameter.shape)
    if parameter.cut is None:
        partial = tp > 1 and (parameter.partial == "always" or layout.sequence_parallel)
        return LocalParameter(parameter, parameter.shape, whole, "tp" if partial else "none", tp, tp_rank == 0)
    size = parameter.shape[parameter.cut]
    copies = 1
    if parameter.pieces == 0:
        rows = -(-size // tp)
        start = tp_rank * rows
    elif parameter.pieces >= tp:
        assert parameter.pieces % tp == 0, (parameter.name, parameter.pieces, tp)
        rows = size // tp
        start = tp_rank * rows
    else:
        assert tp % parameter.pieces == 0, (parameter.name, parameter.pieces, tp)
        rows = size // parameter.pieces
        copies = tp // parameter.pieces
        start = tp_rank // copies * rows
    span = (min(start, size), min(start + rows, size))
    shape = tuple(rows if d == parameter.cut else n for d, n in enumerate(parameter.shape))
    box = tuple(span if d == parameter.cut else ends for d, ends in enumerate(whole))
    return LocalParameter(parameter, shape, box, "kv" if copies > 1 else "none", copies, tp_rank % copies == 0)
