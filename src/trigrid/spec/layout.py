"""How a model is cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["dp", "pp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "cp", "tp")

ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of each axis and the policies along it.

    tp: tensor parallel degree; pp: pipeline stages' ranks; cp: context parallel degree; dp: data parallel degree.
    dp_replicate: copies of the ZeRO shards (HSDP); dp = dp_replicate × dp_shard.
    zero: ZeRO stage 0-3 (Rajbhandari 2020). `gather` and `reduce`, where given, replace the policy that the stage
    implies: weights are gathered once per step or at each use, gradients reduced once per step or after each
    microbatch. stage_layers: layers of each pipeline stage, in order; empty: as even as possible.
    order: rank order, slowest axis first.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    dp_replicate: int = 1
    zero: ZeroStage = 1
    gather: Literal["auto", "per_step", "per_use"] = "auto"
    reduce: Literal["auto", "per_step", "per_microbatch"] = "auto"
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    recompute: Literal["none", "full"] = "none"
    sequence_parallel: bool = True
    stage_layers: tuple[int, ...] = ()
    order: tuple[Axis, ...] = AXES

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def dp_shard(self) -> int:
        return self.dp // self.dp_replicate

    def degree(self, axis: Axis) -> int:
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp}[axis]


@dataclass(frozen=True)
class ZeroPolicy:
    """What a ZeRO stage means, in the two choices that make it and whether the optimizer is sharded."""

    shard_optimizer: bool
    shard_weights: bool
    gather_per_use: bool
    reduce_per_microbatch: bool


def zero_policy(layout: Layout) -> ZeroPolicy:
    """The policies of `layout`, with those it names put in place of those its stage implies."""
    gather = layout.gather if layout.gather != "auto" else ("per_use" if layout.zero == 3 else "per_step")
    reduce = layout.reduce if layout.reduce != "auto" else ("per_microbatch" if layout.zero >= 2 else "per_step")
    return ZeroPolicy(
        shard_optimizer=layout.zero >= 1,
        shard_weights=layout.zero == 3,
        gather_per_use=gather == "per_use",
        reduce_per_microbatch=reduce == "per_microbatch",
    )
