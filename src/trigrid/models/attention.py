"""Causal attention, over a whole sequence or within each of its documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trigrid.engine.dropout import drop_, dropped
from trigrid.engine.units import Microbatch


class Drop(NamedTuple):
    """Which probabilities are dropped: by rows_BNS, the keys of `engine.dropout`, with probability `rate`."""

    rows_BNS: Callable[[], Tensor]
    rate: float


Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, Drop | None, bool], Tensor]
"""(q_BNSD, k_BMSD, v_BMSD, mask_B1SS, drop, again) → o_BNSD; M KV heads serve N query heads. The mask is added to the
scores: 0 where a query (row) may see a key (column), else −∞; without one a query sees the keys up to its own place.
again: whatever is S² large is not kept but made again in backward; fused kernels always do so."""


def causal_attention(
    q_BNSD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, mask_B1SS: Tensor | None, drop: Drop | None, again: bool
) -> Tensor:
    if drop is not None:
        return _Unfused.apply(q_BNSD, k_BMSD, v_BMSD, mask_B1SS, drop, again)  # type: ignore[no-untyped-call, no-any-return]
    if mask_B1SS is None:
        return F.scaled_dot_product_attention(q_BNSD, k_BMSD, v_BMSD, is_causal=True, enable_gqa=True)
    return F.scaled_dot_product_attention(q_BNSD, k_BMSD, v_BMSD, attn_mask=mask_B1SS, enable_gqa=True)


class _Unfused(torch.autograd.Function):
    """Attention whose probabilities reach memory, where some are dropped.

    Kept for backward: queries, keys, values and, unless `again`, the probabilities before dropout. The G query heads
    that share a KV head stand below one another, so that keys and values are never copied.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BNSD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, mask_B1SS: Tensor | None, drop: Drop, again: bool
    ) -> Tensor:
        p_BNSS = _probabilities(q_BNSD, k_BMSD, mask_B1SS)
        ctx.drop = drop
        ctx.save_for_backward(q_BNSD, k_BMSD, v_BMSD, mask_B1SS, None if again else p_BNSS)
        gone = dropped(drop.rows_BNS(), k_BMSD.shape[2], drop.rate)
        dropped_BNSS = drop_(p_BNSS if again else p_BNSS.clone(), gone, drop.rate)
        return (_grouped(dropped_BNSS, v_BMSD.shape[1]) @ v_BMSD).view(q_BNSD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSD, k_BMSD, v_BMSD, mask_B1SS, p_BNSS = ctx.saved_tensors
        kv_heads, rate = k_BMSD.shape[1], ctx.drop.rate
        if p_BNSS is None:
            p_BNSS = _probabilities(q_BNSD, k_BMSD, mask_B1SS)
        gone = dropped(ctx.drop.rows_BNS(), k_BMSD.shape[2], rate)
        out_BMTD = _grouped(grad_BNSD, kv_heads)
        of_v = _grouped(drop_(p_BNSS.clone(), gone, rate), kv_heads).mT @ out_BMTD
        scores_BNSS = drop_((out_BMTD @ v_BMSD.mT).view(p_BNSS.shape), gone, rate)
        scores_BNSS -= (scores_BNSS * p_BNSS).sum(-1, keepdim=True)
        scores_BMTS = _grouped(scores_BNSS.mul_(p_BNSS).mul_(q_BNSD.shape[-1] ** -0.5), kv_heads)
        of_q = (scores_BMTS @ k_BMSD).view(q_BNSD.shape)
        of_k = scores_BMTS.mT @ _grouped(q_BNSD, kv_heads)
        return of_q, of_k, of_v, None, None, None


def _probabilities(q_BNSD: Tensor, k_BMSD: Tensor, mask_B1SS: Tensor | None) -> Tensor:
    scores_BMTS = _grouped(q_BNSD * q_BNSD.shape[-1] ** -0.5, k_BMSD.shape[1]) @ k_BMSD.mT
    scores_BNSS = scores_BMTS.view(*q_BNSD.shape[:3], -1)
    if mask_B1SS is None:
        places_S = torch.arange(k_BMSD.shape[2], device=k_BMSD.device)
        scores_BNSS.masked_fill_(places_S[:, None] < places_S, -torch.inf)
    else:
        scores_BNSS += mask_B1SS
    return scores_BNSS.softmax(-1)


def _grouped(x_BNSX: Tensor, kv_heads: int) -> Tensor:
    """[B, M, G · S, …]: the query heads of each KV head below one another."""
    batch, heads, queries, width = x_BNSX.shape
    return x_BNSX.reshape(batch, kv_heads, heads // kv_heads * queries, width)


class DocumentMasks:
    """The masks of microbatches whose tokens attend within their documents.

    All blocks share the mask of a microbatch for as long as one of them keeps it for its backward; without a backward
    each block makes its own. It has the format of the scores, since kernels take another one to that, and keep it, in
    each block: so masks take S² elements for each row in flight, whatever the number of layers.
    """

    def __init__(self) -> None:
        self._masks: WeakKeyDictionary[Microbatch, ReferenceType[Tensor]] = WeakKeyDictionary()

    def of(self, microbatch: Microbatch, dtype: torch.dtype) -> Tensor | None:
        """mask_B1SS for queries of `dtype`, or None for a microbatch without documents."""
        if microbatch.documents_SB is None:
            return None
        known = self._masks.get(microbatch)
        mask_B1SS = known() if known else None
        if mask_B1SS is None:
            documents_BS = microbatch.documents_SB.t()
            seen_B1SS = (documents_BS[:, :, None] == documents_BS[:, None, :])[:, None].tril_()
            hidden = torch.full(seen_B1SS.shape, -torch.inf, dtype=dtype, device=seen_B1SS.device)
            mask_B1SS = hidden.masked_fill_(seen_B1SS, 0.0)
            self._masks[microbatch] = ref(mask_B1SS)
        return mask_B1SS
