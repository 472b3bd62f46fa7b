"""Floating-point operations of one rank by kind: counted in the program, and from the shapes of its parameters.

A product with a weight W, kept as [out, in], is a forward where it takes W transposed and the gradient of an input
where it takes W as it is; one without any weight is the gradient of a weight, or a part of attention where it comes in
batches. Both sides count all S² scores, of which a causal mask leaves half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trigrid.blueprint.buckets import UnitBuckets, job_buckets
from trigrid.blueprint.frozen import frozen_parameters
from trigrid.blueprint.parameters import localise
from trigrid.engine.zero import Bucket
from trigrid.plan.compute import BACKWARD_OF_FUSED_ATTENTION
from trigrid.plan.software import engine_software
from trigrid.schedule import Action, Kind
from trigrid.spec.job import Job

FORWARD, INTO, WEIGHTS, AGAIN = (
    f"products, {of}" for of in ("forward", "input gradients", "weight gradients", "recomputed")
)
ATTEND, ATTEND_BACK, ATTEND_AGAIN = (f"attention, {of}" for of in ("forward", "backward", "recomputed"))
KINDS = (FORWARD, INTO, WEIGHTS, AGAIN, ATTEND, ATTEND_BACK, ATTEND_AGAIN)
LOOKED_UP = ("embedding", "positions")

aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default: 0,
    aten.mm.out: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.addmm.out: 1,
    aten.baddbmm.default: 1,
}
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default
FUSED_BACK = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products and attention while it is entered. flops: by kind; action: what the rank does now."""

    def __init__(self, buckets: Sequence[Bucket], action: Callable[[], object]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str] = Counter()
        self._buckets, self._action = buckets, action

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            self._product(*args[PRODUCTS[func] : PRODUCTS[func] + 2])
        elif func is FUSED:
            q, k, v = args[:3]
            self._attention(2 * prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3]), False)
        elif func is FUSED_BACK:
            q, k, v = args[1:4]
            forward = 2 * prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3])
            self._attention(int(BACKWARD_OF_FUSED_ATTENTION * forward), True)
        return func(*args, **(kwargs or {}))

    def _product(self, a: Tensor, b: Tensor) -> None:
        flops = 2 * prod(a.shape) * b.shape[-1]
        weight = next((t for t in (b, a) if any(bucket.owns(t) for bucket in self._buckets)), None)
        if weight is None and a.dim() == 3:
            self._attention(flops, torch._C._current_graph_task_id() != -1)
        elif weight is None:
            self.flops[WEIGHTS] += flops
        elif weight.stride(-1) == 1 and weight.stride(-2) != 1:
            self.flops[INTO] += flops
        else:
            self.flops[FORWARD if self._forwards else AGAIN] += flops

    def _attention(self, flops: int, back: bool) -> None:
        self.flops[ATTEND_BACK if back else ATTEND if self._forwards else ATTEND_AGAIN] += flops

    @property
    def _forwards(self) -> bool:
        action = self._action()
        return isinstance(action, Action) and action.kind is Kind.FORWARD


def step_flops(job: Job, pp_rank: int, tp_rank: int) -> dict[str, int]:
    """Operations of a step of one rank by kind: of a product 2 for each token and element of its weight, of attention 4
    for each query, key and element of a head; backward takes twice as much, and 2.5 times in a fused kernel, which
    makes the scores again (Dao 2022)."""
    _, stages = job_buckets(job, pp_rank, tp_rank)
    still = frozen_parameters(job)
    found: Counter[str] = Counter()
    for stage, units in stages.items():
        for unit in units:
            found += _of_unit(job, unit, job.parallel.recompute_of(stage), tp_rank, still)
    microbatches = job.batch.microbatches(job.parallel)
    return {kind: microbatches * found[kind] for kind in KINDS if found[kind]}


def _of_unit(job: Job, placed: UnitBuckets, recompute: str, tp_rank: int, still: frozenset[str]) -> Counter[str]:
    rows, sequence = job.batch.micro_batch, job.batch.sequence
    found: Counter[str] = Counter()
    attends = 0
    for parameter in placed.unit.parameters:
        local = localise(parameter, job.parallel, tp_rank)
        if len(local.shape) != 2 or parameter.role in LOOKED_UP:
            continue
        one = 2 * rows * sequence * local.numel
        chunked = parameter.role == "head" and job.parallel.loss_chunks > 1
        found[FORWARD] += one
        found[INTO] += one
        found[WEIGHTS] += 0 if parameter.name in still else one
        found[AGAIN] += one * ((recompute == "full") + chunked)
        if parameter.role == "q":
            attends = 4 * rows * sequence**2 * local.shape[0]
    fused = engine_software(job).kernels.fused_attention
    back = BACKWARD_OF_FUSED_ATTENTION if fused else 2.5 if recompute == "selective" else 2.0
    found[ATTEND] += attends
    found[ATTEND_BACK] += int(back * attends)
    found[ATTEND_AGAIN] += attends if recompute == "full" else 0
    return found
