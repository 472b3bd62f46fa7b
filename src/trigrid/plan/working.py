"""What this project's engine holds for a while, as `trigrid prove` traces it: in the backward of a block, moment by
moment, in the last backward of a step, and of messages.

Autograd comes to the nodes that hand out weights last, so the gradients of all weights of a unit, in the compute
format, wait for the end of its backward; what the forward saved dies on the way. So the fullest moment is early where
microbatches are large, and late where weights are. All moments are counted from the begin of the backward, when all
that is saved is alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from trigrid.blueprint.terms import Claims, Gemm, Kernels
from trigrid.plan.compute import Cut
from trigrid.plan.setup import SPLIT_BACKWARD, Setup
from trigrid.spec.model import ModelSpec

FFN = ("gate", "up", "down")


class Working(NamedTuple):
    """Bytes at most in a whole backward, and in one of the input alone, after which the queue holds outputs'
    gradients and no weight's gradient exists."""

    whole: float
    of_input: float


def llama_backward(
    spec: ModelSpec, gemms: tuple[Gemm, ...], kernels: Kernels, cut: Cut, compute: int, selective: bool
) -> Working:
    """Of a block with RMSNorm, rotary attention and SwiGLU. compute: bytes of an element."""
    sp = cut.sequence_parallel
    wide = cut.tokens * spec.hidden * compute
    cut_along = wide / cut.tp if sp else wide
    arrives = wide if sp else 0.0  # the gathered gradient of a row-parallel product's output
    inner = cut.tokens * spec.ffn * compute / cut.tp
    q = cut.tokens * spec.heads * spec.head_dim * compute / cut.tp
    k = cut.tokens * spec.kv_heads * spec.head_dim * compute / min(cut.tp, spec.kv_heads)
    norm = _norm(spec, kernels, cut, compute)
    weights = {g.role: _weight(g, cut) * compute for g in gemms}
    ffn = sum(weights[role] for role in FFN)
    attention = sum(weights.values()) - ffn
    down = weights["down"]
    # Selective recomputation keeps two of the four tensors of the inner width, and makes the others again.
    held = 2 if selective else 4
    # So it does with a norm's output, unless that was gathered; its gradient and what it comes from wait beside it.
    remade = selective and not (sp and not kernels.regather)
    entry = cut_along if sp else wide
    normal = 2 * wide + norm if remade else entry + norm
    waiting = 2 * inner if remade else -wide
    first = ffn - held * inner  # the feed-forward is through
    then = first if remade else first - wide  # and so is its norm
    moments = (
        arrives + down + inner,
        arrives + down + (5 if selective else 2) * inner,
        first + 2 * wide + (wide + 2 * inner if remade else inner),
        first + waiting + normal,
        then + arrives + attention / 2 + 2 * q + 2 * k,
        then + attention + 2 * wide - k + (wide if remade else -q),
        then + attention + (normal if remade else normal - wide - 2 * q - 2 * k),
    )
    return Working(max(moments), arrives + max(4 * inner, entry + norm))


def _norm(spec: ModelSpec, kernels: Kernels, cut: Cut, compute: int) -> float:
    """Of a norm's backward: one result where it is one kernel; run operation by operation, its parts in fp32."""
    numbers = cut.tokens * spec.hidden / (cut.tp if cut.sequence_parallel else 1)
    if kernels.fused_norm:
        return numbers * compute
    return numbers * max(4, compute) * (5 if compute < 4 else 4)


def _weight(gemm: Gemm, cut: Cut) -> float:
    """Elements of a product's weight on one rank."""
    shards = 1 if gemm.cut == "none" else min(cut.tp, gemm.pieces or cut.tp)
    return gemm.into * gemm.out / shards


def queued(spec: ModelSpec, unit: Claims, kernels: Kernels, cut: Cut) -> float:
    """Elements per token that wait from an input backward to its weight backward: the gradient of each product's
    output, and its input, once where neighbours share it."""
    many = spec.experts.top_k if spec.experts else 1
    shards = cut.tp if cut.sequence_parallel and kernels.regather else 1
    found, before = 0.0, None
    for product in unit.gemms:
        times = many if product.routed else 1
        columns = product.cut == "out"
        found += times * product.out / (cut.tp if columns else 1)
        entry = (product.into, product.routed) if columns else None
        if entry is None or entry != before:
            found += times * product.into / (shards if columns else cut.tp if product.cut == "into" else 1)
        before = entry
    return found


def messages(setup: Setup, rank: int, last: bool) -> int:
    """Of stage boundaries, those that are on a pipeline rank beside what is kept for backward: on each channel a
    receive is posted ahead or a send may be unfinished, and a backward starts from a gradient, but for the loss's."""
    holders = [setup.holder(stage) for stage in range(setup.pp * setup.virtual)]
    neighbours = {pair for pair in pairwise(holders) if pair[0] != pair[1]}
    neighbours |= {(b, a) for a, b in neighbours}
    return sum(rank in pair for pair in neighbours) + (not last)


def last_backward(
    setup: Setup, own: tuple[tuple[str, int], ...], sizes: Mapping[str, int], kept: float, elements: float
) -> tuple[float, float]:
    """Of the last backward of a step that reduces once: bytes that are kept and elements whose reduction is through,
    at its first block or its last, whichever are more together.

    own: (kind, number) of its blocks; sizes: elements of a unit of each kind on the rank; kept: bytes of all of its
    blocks; elements: of the whole rank.
    """
    if setup.schedule in SPLIT_BACKWARD or not own:
        return 0.0, 0.0
    through = elements - sizes.get("embedding", 0)
    at_first = kept, through - sum(count * sizes[kind] for kind, count in own)
    at_last = kept / sum(count for _, count in own), through - sizes[own[0][0]]
    return max(at_first, at_last, key=lambda found: found[0] + 4 * found[1] / setup.shards)
