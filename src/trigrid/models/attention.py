"""Causal attention, over a whole sequence or within each of its documents."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor

from trigrid.engine.units import Microbatch

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q_BNSD, k_BMSD, v_BMSD, mask_B1SS) → o_BNSD; M KV heads serve N query heads. The mask is true where a query (row)
may see a key (column); without one a query sees the keys up to its own place."""


def causal_attention(q_BNSD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, mask_B1SS: Tensor | None) -> Tensor:
    if mask_B1SS is None:
        return F.scaled_dot_product_attention(q_BNSD, k_BMSD, v_BMSD, is_causal=True, enable_gqa=True)
    return F.scaled_dot_product_attention(q_BNSD, k_BMSD, v_BMSD, attn_mask=mask_B1SS, enable_gqa=True)


class DocumentMasks:
    """The masks of microbatches whose tokens attend within their documents.

    All blocks share the mask of a microbatch for as long as one of them keeps it for its backward; without a backward
    each block makes its own. So masks take S² bytes for each row in flight, whatever the number of layers.
    """

    def __init__(self) -> None:
        self._masks: WeakKeyDictionary[Microbatch, ReferenceType[Tensor]] = WeakKeyDictionary()

    def of(self, microbatch: Microbatch) -> Tensor | None:
        """mask_B1SS, or None for a microbatch without documents."""
        if microbatch.documents_SB is None:
            return None
        known = self._masks.get(microbatch)
        mask_B1SS = known() if known else None
        if mask_B1SS is None:
            documents_BS = microbatch.documents_SB.t()
            same_B1SS = (documents_BS[:, :, None] == documents_BS[:, None, :])[:, None]
            mask_B1SS = torch.tril(same_B1SS)
            self._masks[microbatch] = ref(mask_B1SS)
        return mask_B1SS
