"""Bytes by category at one moment on one rank: the same object for predicted, traced and measured memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trigrid.blueprint.buckets import BucketLayout
from trigrid.spec.layout import ZeroPolicy
from trigrid.spec.precision import FORMAT_BYTES, Precision

STATE = ("weights", "master", "gradients", "optimizer")


@dataclass(frozen=True)
class Ledger:
    """bytes of each category; categories that are absent hold nothing."""

    bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    def __getitem__(self, category: str) -> int:
        return self.bytes.get(category, 0)

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger({k: self[k] + other[k] for k in {**self.bytes, **other.bytes}})


def state_between_steps(bucket: BucketLayout, shard: int, policy: ZeroPolicy, precision: Precision) -> Ledger:
    """State that the holder of shard number `shard` has of `bucket` between two optimizer steps.

    weights: in the compute format, full, or none where ZeRO-3 keeps only the master shard. master: the optimizer's
    copy, nothing where the weights themselves serve, and of a frozen bucket, which has nothing else, the shard in the
    compute format. gradients: what persists over a step, full or the shard.
    optimizer: AdamW's two moments, which a bucket's tail has none of. (Rajbhandari 2020, section 5, with this
    engine's formats.)
    """
    held = bucket.shard_numel if policy.shard_optimizer else bucket.numel
    compute, master = FORMAT_BYTES[precision.compute], FORMAT_BYTES[precision.master]
    if bucket.frozen:
        weights, shard = (0, held) if policy.shard_weights else (bucket.numel, 0)
        return Ledger({"weights": weights * compute, "master": shard * compute})
    updated = sum(run.stop - run.start for run in (bucket.shard_runs(shard) if policy.shard_optimizer else bucket.runs))
    kept = bucket.shard_numel if policy.reduce_per_microbatch else bucket.numel
    weights_serve = precision.compute == precision.master and not policy.shard_weights
    return Ledger(
        {
            "weights": 0 if policy.shard_weights else bucket.numel * compute,
            "master": 0 if weights_serve else held * master,
            "gradients": kept * FORMAT_BYTES[precision.reduce],
            "optimizer": 2 * updated * master,
        }
    )
