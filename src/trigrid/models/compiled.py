"""Blocks as graphs of torch.compile, one for all layers that are alike.

Weights enter a graph as its inputs, all of a block before it runs: so the compiler may compute in any order, autograd
saves no copy of one, and gathered weights are found among what it saves. Gradients come out together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trigrid.engine.traced import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from trigrid.engine.units import Microbatch, UnitFunction
from trigrid.models.block import Block, Ways

BACKEND = "inductor"
_ATEN = torch.ops.aten
# What recomputation never makes again.
_DEAR = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ALL_REDUCE,
    REDUCE_SCATTER,
}
# Kinds of graphs of a run: layers with other frozen weights, with and without gradients, with and without dropout.
MOST_GRAPHS = 64


class CompiledBlock:
    """`block`, whose tensor parallelism must be over a `TracedComm`. regather: as in `TensorParallel`."""

    def __init__(self, block: Block, regather: bool):
        self._block = block
        self._runs = {selective: _compiled(block, selective, regather) for selective in (False, True)}

    def function(self, ways: Ways) -> UnitFunction:
        run, plain = self._runs[ways.selective], replace(ways, selective=False)

        def call(w: Mapping[str, Tensor], x_SBH: Tensor, microbatch: Microbatch) -> Tensor:
            mask_B1SS = self._block.prepare(microbatch, x_SBH.dtype)
            # Without gradients there is one graph, whoever may ask for one of its input later.
            x_SBH = x_SBH if torch.is_grad_enabled() else x_SBH.detach()
            return run({role: w[role] for role in w}, x_SBH, microbatch, mask_B1SS, plain)

        return call


def _compiled(block: Block, selective: bool, regather: bool) -> Callable[..., Tensor]:
    def run(*inputs: Any) -> Tensor:
        if not selective and not regather:
            return block.compute(*inputs)
        kept = partial(_kept, selective, regather)
        contexts = partial(create_selective_checkpoint_contexts, kept)
        made: Tensor = checkpoint(
            block.compute, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return made

    return torch.compile(  # type: ignore[call-overload, no-any-return]
        run, fullgraph=True, dynamic=False, backend=BACKEND, recompile_limit=MOST_GRAPHS, isolate_recompiles=True
    )


def _kept(selective: bool, regather: bool, _: object, operator: object, *inputs: Any, **__: object) -> CheckpointPolicy:
    """Whether what `operator` makes is kept for backward, as `parallel.recompute` and `parallel.regather` say."""
    if operator is ALL_GATHER:
        return CheckpointPolicy.MUST_RECOMPUTE if regather else CheckpointPolicy.MUST_SAVE
    if not selective or operator in _DEAR or (operator is _ATEN.bmm.default and not _are_scores(*inputs)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _are_scores(one: Tensor, other: Tensor) -> bool:
    """Whether the product of batches of matrices is larger than what it is made of, as unfused attention's scores."""
    return other.shape[-1] > one.shape[-1]
