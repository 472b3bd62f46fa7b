"""Tensors that backward makes again from what they were made of, where autograd would keep them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

Make = Callable[..., Tensor]
"""Tensors → a tensor, by operations that are cheap for its size, such as a norm. Weights are among the arguments: one
in a closure would outlive its being given up."""


def make(how: Make, *inputs: Tensor) -> Tensor:
    """`how` of `inputs`, which alone are kept; within `unkept`, so is no use of the result."""
    return _Made.apply(how, *inputs)  # type: ignore[no-untyped-call, no-any-return]


def unkept(*tensors: Tensor) -> AbstractContextManager[object]:
    """While it is entered, operations keep the recipes of those `tensors` that `make` gave in place of them."""
    nodes: dict[int, Any] = {}
    for tensor in tensors:
        if getattr(tensor.grad_fn, "_forward_cls", None) is _Made:
            nodes[tensor.untyped_storage()._cdata] = tensor.grad_fn
    if not nodes:
        return nullcontext()

    def pack(tensor: Tensor) -> object:
        node = nodes.get(tensor.untyped_storage()._cdata)
        return (node, tensor.shape, tensor.stride(), tensor.storage_offset()) if node else tensor

    return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    node, *view = packed
    _, made = _again(node)
    return made.detach().as_strided(*view)


def _again(node: Any) -> tuple[list[Tensor], Tensor]:
    """What `node` made, made once more, with what it was made of; kept until the backward of `node` itself."""
    if node.again is None:
        node.again = with_graph(node.how, node.saved_tensors, node.needs_input_grad[1:])
    again: tuple[list[Tensor], Tensor] = node.again
    return again


def with_graph(how: Make, inputs: tuple[Tensor, ...], needed: tuple[bool, ...]) -> tuple[list[Tensor], Tensor]:
    """Copies of `inputs` that ask for a gradient where it is `needed`, and what `how` makes of them."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed, strict=True)]
        return leaves, how(*leaves)


def through(leaves: list[Tensor], made: Tensor, gradient: Tensor) -> list[Tensor | None]:
    """The gradients of `leaves`, by `with_graph`, from that of what was made of them."""
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    answers = iter(torch.autograd.grad(made, asked, gradient))
    return [next(answers) if leaf.requires_grad else None for leaf in leaves]


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Make, *inputs: Tensor) -> Tensor:
        ctx.how, ctx.again = how, None
        ctx.save_for_backward(*inputs)
        return how(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        leaves, made = _again(ctx)
        ctx.again = None
        return None, *through(leaves, made, gradient)
