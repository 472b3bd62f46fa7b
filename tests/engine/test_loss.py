"""The head's loss in pieces of the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trigrid.blueprint import decoder
from trigrid.blueprint.parameters import LocalParameter, localise
from trigrid.engine.comm import Comm
from trigrid.engine.loss import head_loss
from trigrid.engine.tensor import Layer, TensorParallel
from trigrid.grid import Grid
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

SEQUENCE, ROWS, HIDDEN, VOCAB = 24, 2, 16, 301
SPEC = ModelSpec(
    name="small", hidden=HIDDEN, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=16, vocab=VOCAB, context=64
)


class Largest(TorchDispatchMode):
    """The most elements of any tensor with a dimension of the vocabulary that is not the weight or its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and VOCAB in tensor.shape and HIDDEN not in tensor.shape:
                self.numel = max(self.numel, tensor.numel())
        return result


def head() -> LocalParameter:
    return localise(decoder(SPEC).parameters["head.weight"], Layout(), 0)


def run(dtype: torch.dtype, chunks: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Loss, both gradients, and the largest logits."""
    generator = torch.Generator().manual_seed(0)
    x_SBH = torch.randn(SEQUENCE, ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight_VH = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels_SB = torch.randint(0, VOCAB, (SEQUENCE, ROWS), generator=generator)
    labels_SB[:7, 0] = -100
    tp = TensorParallel(Comm(Grid(Layout()), 0), False)
    with Largest() as largest:
        loss = head_loss(x_SBH, Layer(weight_VH), labels_SB, torch.tensor(0.01, dtype=dtype), head(), tp, chunks)
        (loss * 3).backward()
    assert x_SBH.grad is not None
    assert weight_VH.grad is not None
    return loss.detach(), x_SBH.grad, weight_VH.grad, largest.numel


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
@pytest.mark.parametrize("chunks", [2, 3, 24])
def test_pieces_give_the_whole_in_a_piece_of_the_memory(dtype: torch.dtype, tolerance: float, chunks: int) -> None:
    """R89."""
    *whole, whole_numel = run(dtype, 1)
    *parts, part_numel = run(dtype, chunks)
    for a, b in zip(parts, whole, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).double().norm() / b.double().norm()) <= tolerance
    assert whole_numel == SEQUENCE * ROWS * VOCAB
    assert part_numel == whole_numel // chunks


def test_the_whole_is_torch_s() -> None:
    loss, x_grad, _, _ = run(torch.float64, 1)
    generator = torch.Generator().manual_seed(0)
    x_SBH = torch.randn(SEQUENCE, ROWS, HIDDEN, generator=generator).double().requires_grad_()
    weight_VH = torch.randn(VOCAB, HIDDEN, generator=generator).double()
    labels_SB = torch.randint(0, VOCAB, (SEQUENCE, ROWS), generator=generator)
    labels_SB[:7, 0] = -100
    wanted = F.cross_entropy((x_SBH @ weight_VH.t()).flatten(0, 1), labels_SB.flatten(), reduction="sum") * 0.01
    (wanted * 3).backward()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(x_grad, x_SBH.grad)
