"""Named precision policies: which number format each kind of state has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["fp64", "fp32", "bf16"]
FORMAT_BYTES: dict[Format, int] = {"fp64": 8, "fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Precision:
    """compute: weights in use and activations; gather: weights on the wire; reduce: gradients kept and on the wire;
    master: the optimizer's weights and moments. Where compute = master there is no separate master copy.
    """

    name: str
    compute: Format
    gather: Format
    reduce: Format
    master: Format


PRECISIONS = {
    "fp64": Precision("fp64", "fp64", "fp64", "fp64", "fp64"),
    "fp32": Precision("fp32", "fp32", "fp32", "fp32", "fp32"),
    "bf16": Precision("bf16", "bf16", "bf16", "fp32", "fp32"),
}
