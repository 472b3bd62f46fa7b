"""The terms in which claims about units are made: kernels, products, passes, saved tensors.

A claim is stated per token of a microbatch and for the whole model; `cut` says what divides it on one rank:
    tp        tensor parallelism always (heads, inner widths, vocabulary)
    sequence  tensor parallelism only where it also cuts the sequence (Korthikanti 2022)
    none      nothing
    only_tp   as tp, and without tensor parallelism there is no such tensor
Context parallelism divides the tokens themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Cut = Literal["tp", "sequence", "none", "only_tp"]
Format = Literal["compute", "fp32", "byte"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which implementation of a unit runs; it decides what is saved and what is read and written again.

    fused_attention: no score ever reaches memory (Dao 2022). keeps_qkv: the attention's inputs are views that hold the
    whole projected tensor beside the rotated queries and keys. gate: what the gated activation keeps beside gate, up
    and their product ("eager" its activated gate too, "recomputed" not even the product, "again" as "fused", but by
    several kernels, which activate the gate again in backward). regather: inputs that sequence parallelism gathered are
    kept in shards and gathered again in backward. dropout: masks after attention and
    feed-forward. fused_passes: neighbouring memory-bound operations run as one kernel; fused_norm: a norm is one, else
    it is written out in fp32, operation by operation; fused_rotary: so is the rotation, and keys and values are
    repeated for their queries. loss: "fused" keeps one fp32
    softmax, "unfused" makes copies of the logits on the way, "chunked" never holds more than a chunk, "in-place" is one
    kernel each way that writes the gradients over the logits, "dtensor" is "unfused" but makes more copies where the
    vocabulary is cut, "pieces" has the logits of one of `pieces` parts of the sequence at a time and computes them
    again in backward. selective: what
    selective recomputation runs again: "attention" its core, "alternate" every second product and all between, "cheap"
    its core and, but for what a collective gathered, the inputs of products that a norm or an activation made.
    documents: tokens attend within their documents, by a mask that is added to the scores.
    hashed_dropout, hashed_scores: dropout of hidden states, and of the attention's probabilities, whose masks are made
    again and not kept. gloo: collectives are gloo's, see `plan.backend`.
    """

    fused_attention: bool = True
    keeps_qkv: bool = False
    gate: Literal["eager", "fused", "recomputed", "again"] = "eager"
    regather: bool = False
    dropout: bool = False
    fused_passes: bool = False
    fused_norm: bool = True
    fused_rotary: bool = True
    loss: Literal["fused", "unfused", "chunked", "in-place", "dtensor", "pieces"] = "fused"
    pieces: int = 1
    selective: Literal["attention", "alternate", "cheap"] = "attention"
    documents: bool = False
    hashed_dropout: bool = False
    hashed_scores: bool = False
    gloo: bool = False


class Gemm(NamedTuple):
    """A matrix product of each token's `into` elements to `out`; cut: which of them TP divides.

    pieces: parts of `out` that cannot be divided (KV heads). again: run again by selective recomputation.
    routed: one product per routed expert, on top_k times the tokens in all.
    """

    role: str
    into: int
    out: int
    cut: Literal["into", "out", "none"]
    pieces: int = 0
    again: bool = False
    routed: bool = False


class Attend(NamedTuple):
    """Attention of `heads` queries over the tokens before; widths of queries and keys, and of values."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int


class Pass(NamedTuple):
    """A memory-bound operation: elements that a token reads and writes, and kernels, forward and backward.

    scores: elements per token *and* token of the sequence. again, gathers: as Saved's dropped and gathers, of what it
    makes. operation: which of this project's engine it is, if any, by which calibrations know it.
    """

    role: str
    forward: float
    backward: float
    kernels: int
    cut: Cut
    scores: bool = False
    again: bool = False
    gathers: bool = False
    operation: str = ""


class Saved(NamedTuple):
    """A tensor kept for backward. scores as in Pass; dropped: selective recomputation makes it again; added: it is kept
    under selective recomputation alone; gathers: where sequence parallelism cuts the sequence, a collective would have
    to make it again, and it is not dropped."""

    name: str
    elements: float
    format: Format
    cut: Cut
    scores: bool = False
    dropped: bool = False
    added: bool = False
    gathers: bool = False


class Claims(NamedTuple):
    """enters, leaves: TP regions of the unit; entering gathers and leaving sums in forward, backward does the other.

    working: elements per token, in the compute format, that backward holds beside the saved tensors, at most.
    """

    kind: str
    gemms: tuple[Gemm, ...]
    attends: tuple[Attend, ...]
    passes: tuple[Pass, ...]
    saved: tuple[Saved, ...]
    enters: int
    leaves: int
    working: tuple[Saved, ...] = ()


def saved_bytes(
    tensors: tuple[Saved, ...],
    *,
    tokens: float,
    sequence: int,
    tp: int,
    sequence_parallel: bool,
    compute_bytes: int,
    selective: bool = False,
) -> float:
    """Bytes of `tensors` on one rank for `tokens` tokens of it, out of sequences of `sequence` tokens."""
    total = 0.0
    for tensor in tensors:
        if (selective and made_again(tensor, sequence_parallel)) or (tensor.added and not selective):
            continue
        if tensor.cut == "only_tp" and tp == 1:
            continue
        size = {"compute": compute_bytes, "fp32": 4, "byte": 1}[tensor.format]
        divided = tp if tensor.cut in ("tp", "only_tp") or (tensor.cut == "sequence" and sequence_parallel) else 1
        total += size * tensor.elements * (sequence if tensor.scores else 1) / divided
    return total * tokens


def made_again(tensor: Saved, sequence_parallel: bool) -> bool:
    """Whether selective recomputation does not keep `tensor`."""
    return tensor.dropped and not (tensor.gathers and sequence_parallel)
