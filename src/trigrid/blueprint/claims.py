"""Claims about the units of a decoder, in the terms of `terms`: their operations, the tensors they save for backward,
their TP collectives. The planner prices claims, the dry run counts the real program.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from trigrid.blueprint.frozen import plain
from trigrid.blueprint.terms import Attend, Claims, Cut, Gemm, Kernels, Pass, Saved
from trigrid.spec.model import ModelSpec

# A mask takes some twelve passes over numbers of four bytes, its use three over the elements: as elements of two bytes.
HASHED = 45 + 6.5
HASH_KERNELS = 14


@lru_cache(maxsize=256)
def claims(spec: ModelSpec, kind: str, kernels: Kernels) -> Claims:
    """The claims about a unit of `kind` ("embedding", a block's kind, "head", see `frozen.Kinds`) of `spec`, as if all
    of it were trained."""
    match plain(kind):
        case "embedding":
            return _embedding(spec, kernels)
        case "head":
            return _head(spec, kernels)
        case "llama":
            return _llama(spec, kernels)
        case "gpt":
            return _gpt(spec, kernels)
        case "moe":
            return _moe(spec, kernels)
    raise AssertionError(f"no unit is of kind {kind}")


def _gathered(kernels: Kernels) -> Cut:
    """How the input of a column-parallel product is kept."""
    return "sequence" if kernels.regather else "none"


def _input(name: str, h: int, kernels: Kernels, dropped: bool) -> Saved:
    """The input of column-parallel products, which a norm makes."""
    gathers = kernels.selective == "cheap" and not kernels.regather
    return Saved(name, h, "compute", _gathered(kernels), dropped=dropped, gathers=gathers)


def _norm(role: str, h: int, kernels: Kernels) -> Pass:
    """Reads and writes once where fused; written out it casts, squares, averages, multiplies, casts, multiplies."""
    again = kernels.selective == "cheap"
    forward, backward, count = 2 * h, (4 if kernels.fused_passes else 5) * h, 1
    if not kernels.fused_norm:
        forward, backward, count = 18 * h, 30 * h, 7
    gathers = not kernels.regather
    return Pass(role, forward, backward, count, "sequence", again=again, gathers=gathers, operation="norm")


def _residual(role: str, h: int, kernels: Kernels) -> Pass:
    # Dropout reads and writes once more and keeps a mask; fused, it is part of the addition.
    extra = HASHED if kernels.hashed_dropout else 2 if kernels.dropout and not kernels.fused_passes else 0
    more = HASH_KERNELS if kernels.hashed_dropout else extra > 0
    return Pass(role, (3 + extra) * h, (1 + extra) * h, 1 + more, "sequence")


class _Part(NamedTuple):
    """Half of a block."""

    gemms: tuple[Gemm, ...]
    passes: tuple[Pass, ...]
    saved: tuple[Saved, ...]


def _llama(spec: ModelSpec, kernels: Kernels) -> Claims:
    """RMSNorm, rotary attention (grouped queries or latent), SwiGLU."""
    return _block(spec, kernels, "llama", _gated(spec, kernels, spec.ffn), 3 * spec.ffn, 0.0)


def _moe(spec: ModelSpec, kernels: Kernels) -> Claims:
    """The same with a router, routed experts on top_k times the tokens, and shared experts.

    What a rank holds and computes does not depend on EP: it is sent as many tokens as it sends, if experts are chosen
    evenly (P2).
    """
    assert spec.experts is not None
    h, experts = spec.hidden, spec.experts
    k, f = experts.top_k, experts.ffn
    gemms = [
        Gemm("router", h, experts.count, "none"),
        Gemm("expert_gate", h, f, "out", routed=True),
        Gemm("expert_up", h, f, "out", routed=True),
        Gemm("expert_down", f, h, "into", routed=True),
    ]
    passes = [
        Pass("route", 6 * experts.count, 8 * experts.count, 8, "sequence"),
        Pass("dispatch", 2 * k * h, 2 * k * h, 3, "sequence"),
        Pass("expert_gated", 3 * k * f, 5 * k * f, 2, "tp"),
        Pass("combine", (2 * k + 1) * h, (2 * k + 1) * h, 3, "sequence"),
    ]
    saved = [
        Saved("router_probabilities", 2 * experts.count, "fp32", "sequence"),
        Saved("dispatched", k * h, "compute", "sequence"),
        Saved("expert_gate", k * f, "compute", "tp"),
        Saved("expert_up", k * f, "compute", "tp"),
    ]
    if kernels.gate != "recomputed":
        saved.append(Saved("expert_down_input", k * f, "compute", "tp"))
    saved.append(Saved("expert_output", k * h, "compute", "sequence"))
    if experts.shared_ffn:
        shared = _gated(spec, kernels, experts.shared_ffn, "shared_")
        gemms, passes, saved = [*gemms, *shared.gemms], [*passes, *shared.passes], [*saved, *shared.saved]
    entry = Saved("ffn_input", h, "compute", _gathered(kernels))
    part = _Part(tuple(gemms), tuple(passes), (entry, *(t for t in saved if t.name != "shared_ffn_input")))
    return _block(spec, kernels, "moe", part, 3 * k * f + 3 * experts.shared_ffn, 2.0 * k * h)


def _block(spec: ModelSpec, kernels: Kernels, kind: str, ffn: _Part, gradients: float, dispatched: float) -> Claims:
    """Attention, then `ffn`, each with its norm and residual. gradients, dispatched: elements per token in flight in
    the backward of `ffn`, cut by TP and along the sequence."""
    h = spec.hidden
    attention = _latent(spec, kernels) if spec.latent else _grouped_queries(spec, kernels)
    alternate = kernels.selective == "alternate"
    saved = (
        Saved("attention_norm_input", h, "compute", "sequence"),
        *attention.saved,
        Saved("ffn_norm_input", h, "compute", "sequence", dropped=alternate),
        *ffn.saved,
    )
    passes = (
        _norm("attention_norm", h, kernels),
        *attention.passes,
        _residual("attention_residual", h, kernels),
        _norm("ffn_norm", h, kernels),
        *ffn.passes,
        _residual("ffn_residual", h, kernels),
    )
    working = (
        Saved("gradients_of_the_gate", gradients, "compute", "tp"),
        Saved("gradients_of_the_residual", 2 * h + dispatched, "compute", "sequence"),
        Saved("gathered_input", h, "compute", "none"),
        *_hash_of_scores(spec, kernels),
    )
    return Claims(kind, (*attention.gemms, *ffn.gemms), (_attend(spec),), passes, saved, 2, 2, working)


def _grouped_queries(spec: ModelSpec, kernels: Kernels) -> _Part:
    h, q, k = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    alternate = kernels.selective == "alternate"
    normed = spec.qk_norm and kernels.selective == "cheap"
    gemms = (
        Gemm("q", h, q, "out"),
        Gemm("k", h, k, "out", spec.kv_heads, again=alternate),
        Gemm("v", h, k, "out", spec.kv_heads),
        Gemm("o", q, h, "into", again=alternate),
    )
    saved = [
        _input("qkv_input", h, kernels, kernels.selective != "attention"),
        *([Saved("qk_norm_inputs", q + k, "compute", "tp", dropped=alternate)] if spec.qk_norm else []),
        *([Saved("qkv", q + 2 * k, "compute", "tp")] if kernels.keeps_qkv else []),
        Saved("rotated_q", q, "compute", "tp", dropped=normed),
        Saved("rotated_k", k, "compute", "tp", dropped=alternate or normed),
        *([] if kernels.keeps_qkv else [Saved("v", k, "compute", "tp")]),
        *_scores(spec, kernels),
        Saved("attention_output", q, "compute", "tp"),
    ]
    rotary = 2 if kernels.fused_passes else 5 if kernels.fused_rotary else 10
    moved, count = rotary * (q + k), 2 if kernels.fused_passes else 8
    passes = [Pass("rotary", moved, moved, count, "tp", again=normed, operation="rotary")]
    if not kernels.fused_rotary and k < q:
        passes.append(Pass("repeat_kv", 2 * (q + k), 2 * (q + k), 2, "tp"))
    if spec.qk_norm:
        passes.append(Pass("qk_norm", 2 * (q + k), 5 * (q + k), 2, "tp", again=normed, operation="norm"))
    return _Part(gemms, (*passes, *_score_passes(spec, kernels)), tuple(saved))


def _latent(spec: ModelSpec, kernels: Kernels) -> _Part:
    """Queries, keys and values from narrow vectors that no TP rank cuts (DeepSeek-V2, section 2.1)."""
    latent, h, heads = spec.latent, spec.hidden, spec.heads
    assert latent is not None
    q, v = heads * (latent.nope_dim + latent.rope_dim), heads * latent.v_dim
    up = heads * (latent.nope_dim + latent.v_dim)
    queries = (
        (Gemm("q_down", h, latent.q_rank, "none"), Gemm("q_up", latent.q_rank, q, "out"))
        if latent.q_rank
        else (Gemm("q", h, q, "out"),)
    )
    gemms = (
        *queries,
        Gemm("kv_down", h, latent.kv_rank + latent.rope_dim, "none"),
        Gemm("kv_up", latent.kv_rank, up, "out"),
        Gemm("o", v, h, "into"),
    )
    saved = (
        Saved("qkv_input", h, "compute", _gathered(kernels)),
        Saved("latents", 2 * (latent.q_rank + latent.kv_rank), "compute", "sequence"),
        Saved("q", q, "compute", "tp"),
        Saved("k", q, "compute", "tp"),
        Saved("keys_and_values", up, "compute", "tp"),
        *_scores(spec, kernels),
        Saved("attention_output", v, "compute", "tp"),
    )
    narrow = latent.q_rank + latent.kv_rank
    passes = (
        Pass("latent_norms", 2 * narrow, 5 * narrow, 2, "sequence"),
        Pass("rotary", 2 * (2 * q + up), 2 * (2 * q + up), 6, "tp"),
        *_score_passes(spec, kernels),
    )
    return _Part(gemms, passes, saved)


def _gated(spec: ModelSpec, kernels: Kernels, f: int, prefix: str = "") -> _Part:
    h, alternate = spec.hidden, kernels.selective == "alternate"
    again = kernels.selective != "attention"
    gemms = (
        Gemm(f"{prefix}gate", h, f, "out"),
        Gemm(f"{prefix}up", h, f, "out", again=alternate),
        Gemm(f"{prefix}down", f, h, "into"),
    )
    saved = [
        _input(f"{prefix}ffn_input", h, kernels, again),
        Saved(f"{prefix}gate", f, "compute", "tp"),
        Saved(f"{prefix}up", f, "compute", "tp", dropped=alternate),
    ]
    if kernels.gate == "eager":
        saved.append(Saved(f"{prefix}activated_gate", f, "compute", "tp", dropped=again))
    if kernels.gate != "recomputed":
        saved.append(Saved(f"{prefix}down_input", f, "compute", "tp", dropped=again))
        if alternate:
            # Run operation by operation, it keeps the output of every second product, needed or not.
            saved.append(Saved(f"{prefix}down_output", h, "compute", "sequence", added=True))
    cheap = kernels.selective == "cheap"
    forward, backward, count = (3, 5, 1) if kernels.fused_passes else (5, 11 if kernels.gate == "again" else 8, 2)
    operation = "" if prefix else "gated"
    passes = (Pass(f"{prefix}gated", forward * f, backward * f, count, "tp", again=cheap, operation=operation),)
    return _Part(gemms, passes, tuple(saved))


def _gpt(spec: ModelSpec, kernels: Kernels) -> Claims:
    """LayerNorm with biases, learned positions, GELU. With dropout and without fused attention the saved tensors are
    34·s·b·h + 5·a·s²·b bytes (Korthikanti 2022, section 4.1)."""
    h, q, f = spec.hidden, spec.heads * spec.head_dim, spec.ffn
    cheap = kernels.selective == "cheap"
    gemms = (
        Gemm("qkv", h, 3 * q, "out"),
        Gemm("o", q, h, "into"),
        Gemm("up", h, f, "out"),
        Gemm("down", f, h, "into"),
    )
    mask = [Saved("dropout_mask", h, "byte", "sequence")] if kernels.dropout else []
    saved = (
        Saved("attention_norm_input", h, "compute", "sequence"),
        _input("qkv_input", h, kernels, cheap),
        Saved("q_and_k", 2 * q, "compute", "tp"),
        Saved("v", q, "compute", "tp"),
        *_scores(spec, kernels),
        Saved("attention_output", q, "compute", "tp"),
        *mask,
        Saved("ffn_norm_input", h, "compute", "sequence"),
        _input("ffn_input", h, kernels, cheap),
        Saved("gelu_input", f, "compute", "tp"),
        Saved("down_input", f, "compute", "tp", dropped=cheap),
        *mask,
    )
    fused = kernels.fused_passes
    # Queries, keys and values are views of one product, whose gradients come together by a copy; without fused
    # attention its output is copied, too.
    copied = 0 if kernels.fused_attention else 2 * q
    heads = Pass("heads", copied, copied + 6 * q, 1, "tp")
    passes = (
        _norm("attention_norm", h, kernels),
        heads,
        *_score_passes(spec, kernels),
        _residual("attention_residual", h, kernels),
        _norm("ffn_norm", h, kernels),
        Pass("gelu", 2 * f, (3 if fused else 4) * f, 2 - fused, "tp", again=cheap, operation="gelu"),
        _residual("ffn_residual", h, kernels),
    )
    working = (
        Saved("gradients_of_the_gelu", 2 * f, "compute", "tp"),
        Saved("gradients_of_the_residual", 2 * h, "compute", "sequence"),
        Saved("gathered_input", h, "compute", "none"),
        *_hash_of_scores(spec, kernels),
    )
    return Claims("gpt", gemms, (_attend(spec),), passes, saved, 2, 2, working)


def _attend(spec: ModelSpec) -> Attend:
    return Attend(spec.heads, spec.kv_heads, spec.head_dim, spec.latent.v_dim if spec.latent else spec.head_dim)


def _scores(spec: ModelSpec, kernels: Kernels) -> list[Saved]:
    """What the attention itself keeps: the log-sum-exp, or the softmax and, with dropout, its mask and output."""
    if kernels.fused_attention:
        return [Saved("log_sum_exp", spec.heads, "fp32", "tp")]
    found = [Saved("softmax", spec.heads, "compute", "tp", scores=True, dropped=True)]
    if kernels.dropout:
        found += [
            Saved("softmax_mask", spec.heads, "byte", "tp", scores=True, dropped=True),
            Saved("softmax_dropped", spec.heads, "compute", "tp", scores=True, dropped=True),
        ]
    return found


def _hash_of_scores(spec: ModelSpec, kernels: Kernels) -> list[Saved]:
    """Two numbers of four bytes for each score, while a mask is made."""
    return [Saved("hash_of_scores", 2 * spec.heads, "fp32", "tp", scores=True)] if kernels.hashed_scores else []


def _score_passes(spec: ModelSpec, kernels: Kernels) -> list[Pass]:
    """Unfused attention writes scores, reads and writes them in softmax and dropout, and reads them again."""
    if kernels.fused_attention:
        return []
    a = spec.heads
    dropout = HASHED * a if kernels.hashed_scores else 2.5 * a if kernels.dropout else 0.0
    count = HASH_KERNELS if kernels.hashed_scores else kernels.dropout
    return [Pass("scores", 4 * a + dropout, 6 * a + dropout, 2 + count, "tp", scores=True)]


def _embedding(spec: ModelSpec, kernels: Kernels) -> Claims:
    h = spec.hidden
    dropout = [Saved("dropout_mask", h, "byte", "sequence")] if kernels.dropout and spec.block == "gpt" else []
    positions = 2 * h if spec.block == "gpt" else 0
    hashed = HASHED * h if kernels.hashed_dropout else 0.0
    passes = (Pass("look_up", 2 * h + positions + hashed, 3 * h + positions + hashed, 2, "sequence"),)
    return Claims("embedding", (), (), passes, tuple(dropout), 0, 1)


def _head(spec: ModelSpec, kernels: Kernels) -> Claims:
    """Final norm, logits and loss. The softmax in fp32 is what the loss keeps; logits themselves are transient."""
    h, v = spec.hidden, spec.vocab
    saved = [
        Saved("final_norm_input", h, "compute", "sequence"),
        Saved("head_input", h, "compute", _gathered(kernels)),
    ]
    if kernels.loss in ("fused", "unfused", "dtensor"):
        saved.append(Saved("softmax", v, "fp32", "tp"))
    in_pieces = kernels.loss == "pieces"
    if in_pieces:
        saved.append(Saved("softmax_sums", 3, "fp32", "none"))
    copies = 0.25 if kernels.loss == "chunked" else 1.0 / kernels.pieces
    working = [Saved("logits", copies * v, "compute", "tp")]
    if in_pieces:
        working.append(Saved("gradients_of_the_input", h, "compute", "none"))
    if kernels.loss in ("unfused", "chunked", "dtensor", "pieces"):
        working.append(Saved("logits_in_fp32", copies * v, "fp32", "tp"))
    if kernels.loss == "dtensor":
        # Backward has softmax, one-hot gradients, exponentials and their sum, all in fp32, for the ten bytes otherwise.
        working.append(Saved("copies_of_the_cut_loss", 1.5 * v, "fp32", "only_tp"))
    back = 8 * v if in_pieces else 4 * v
    operation = "" if in_pieces else "loss"
    loss = Pass("loss", 8 * v, back, 6, "tp", operation=operation)
    if kernels.loss == "in-place":
        loss = Pass("loss", v, 2 * v, 2, "tp")
    passes = (_norm("final_norm", h, kernels), loss)
    gemms = (Gemm("head", h, v, "out", again=in_pieces),)
    return Claims("head", gemms, (), passes, tuple(saved), 1, 0, tuple(working))
