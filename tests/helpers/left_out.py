"""More bugs to plant: something that the engine must do, left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from trigrid.blueprint.parameters import LocalParameter
from trigrid.engine.comm import Comm, Pending
from trigrid.models import decoder


@contextmanager
def sums_over(axis: str) -> Iterator[None]:
    """Ranks of `axis` keep their own part of what should be added up."""
    with ExitStack() as stack:
        for name in ("all_reduce", "all_reduce_start"):
            stack.enter_context(patch.object(Comm, name, _reduction(getattr(Comm, name), name, axis)))
        yield


def _reduction(original: Any, name: str, axis: str) -> Any:
    def reduce(self: Comm, tensor: Tensor, over: str, op: Any = "sum") -> Any:
        # The check of copies, which must see the fault, asks for the largest.
        if over != axis or op == "max":
            return original(self, tensor, over, op)
        return tensor if name == "all_reduce" else Pending(None, tensor)

    return reduce


@contextmanager
def mask_of_the_padded_vocabulary() -> Iterator[None]:
    """Padded columns join the softmax with a logit of 0 (Megatron-LM#1754)."""
    loss = decoder.head_loss

    def unmasked(*arguments: Any) -> Tensor:
        return loss(*(_without_padding(a) if isinstance(a, LocalParameter) else a for a in arguments))

    with patch.object(decoder, "head_loss", unmasked):
        yield


def _without_padding(local: LocalParameter) -> LocalParameter:
    start = local.box[0][0]
    return replace(local, box=((start, start + local.shape[0]), *local.box[1:]))
