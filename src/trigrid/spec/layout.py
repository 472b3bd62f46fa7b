"""How a model is cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["dp", "pp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "cp", "tp")

ZeroStage = Literal[0, 1, 2, 3]
ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev", "auto"]
RecomputeName = Literal["none", "selective", "full"]
V_SHAPED: tuple[ScheduleName, ...] = ("zbv", "dualpipev")
SPLIT_BACKWARD: tuple[ScheduleName, ...] = ("zb-h1", *V_SHAPED)
"""Schedules with backwards in two halves."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of each axis and the policies along it; `zero` stands for both policies, of which either may be replaced.

    ZeRO: Rajbhandari 2020. Recomputation: Chen 2016. Sequence parallelism: Korthikanti 2022.
    """

    tp: int = 1
    """Tensor-parallel degree, a divisor of heads and ffn; KV heads are copied where there are fewer."""
    pp: int = 1
    """Pipeline ranks, of virtual_stages stages each."""
    cp: int = 1
    """Context-parallel degree; only 1 runs so far."""
    dp: int = 1
    """Data-parallel degree; left out: what fills the launcher's ranks, or what the batch asks for."""
    dp_replicate: int = 1
    """Copies of the ZeRO shards (HSDP): dp = dp_replicate · dp_shard."""
    zero: ZeroStage = 1
    """ZeRO stage: 0 shards nothing, 1 the optimizer, 2 also the gradients, 3 also the weights."""
    gather: Literal["auto", "per_step", "per_use"] = "auto"
    """When weights are gathered; auto: per_use in ZeRO stage 3, which alone allows it, per_step in the others."""
    reduce: Literal["auto", "per_step", "per_microbatch"] = "auto"
    """When gradients are reduced; auto: per_microbatch from ZeRO stage 2 on, per_step below."""
    ep: int = 1
    """Expert-parallel degree, a divisor of dp · cp and of the experts; only 1 runs so far."""
    schedule: ScheduleName = "1f1b"
    """Order of forwards and backwards in the pipeline; auto: made for the job's own stages, in the planner's times and
    within their memory."""
    schedule_file: str = ""
    """A .csv or .json file of actions that stands in for those of the named schedule, whose stages it has in their
    places; empty: none."""
    virtual_stages: int = 1
    """Stages of each pipeline rank; more than 1 in interleaved and auto, 2 in zbv and dualpipev."""
    recompute: RecomputeName | tuple[RecomputeName, ...] = "none"
    """full: keep only the input of each unit, such as a block, and run it again in backward; selective: run again what
    is cheap for its size; or an array of a word for each pipeline stage, such as ["full", "none"]."""
    prefetch: int = 1
    """Units whose weights ZeRO stage 3 gathers ahead of their use; each takes its unit's whole weights in memory."""
    bucket_numel: int = 0
    """Consecutive units share a bucket, and so each collective of data parallelism, of at most this many elements per
    tensor-parallel rank; a unit with more has its own, and 0 gives one to each."""
    sequence_parallel: bool = True
    """Cut activations along the sequence between tensor-parallel regions."""
    regather: bool = False
    """Under sequence_parallel, gather the input of a block's tensor-parallel regions again in backward, instead of
    keeping all of it: tp times less of it in memory for half as many all-gathers again."""
    loss_chunks: int = 1
    """Pieces of the sequence, a divisor of it, whose logits exist one at a time; with more than 1 they are computed
    again in backward."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage, such as [7, 8, 8, 7]; empty: as even as they go."""
    order: tuple[Axis, ...] = AXES
    """Order of the ranks, slowest axis first."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def dp_shard(self) -> int:
        return self.dp // self.dp_replicate

    @property
    def stages(self) -> int:
        """Pipeline stages of all ranks together."""
        return self.pp * self.virtual_stages

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage: round and round, or down and up again in V-shaped schedules."""
        there = tuple(range(self.pp))
        return (*there, *reversed(there)) if self.schedule in V_SHAPED else there * self.virtual_stages

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == pp_rank)

    def recompute_of(self, stage: int) -> RecomputeName:
        """What pipeline stage `stage` runs again."""
        return self.recompute if isinstance(self.recompute, str) else self.recompute[stage]

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
