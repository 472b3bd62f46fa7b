"""What the engine computes element by element: norms, rotary positions, activations, the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trigrid.blueprint.claims import claims
from trigrid.blueprint.decoder import decoder
from trigrid.blueprint.terms import Pass
from trigrid.check.calibrate_meter import Meter, Result, ends_first
from trigrid.engine.comm import Comm
from trigrid.engine.loss import cross_entropy
from trigrid.grid import grid_of
from trigrid.models.gpt import gelu
from trigrid.models.llama import swiglu
from trigrid.models.norms import Norm
from trigrid.models.rope import Rope, rotate_heads
from trigrid.plan.measured import Operation
from trigrid.plan.software import engine_software
from trigrid.spec.job import Job

# Bytes of inputs that are tried: from next to nothing to beyond the caches near the cores.
BYTES = (2**10, *(2**n for n in range(16, 26, 2)))

Call = Callable[[], Result]


@dataclass(frozen=True)
class Functions:
    """The engine's operations by name, for models like the job's: of so many tokens a call, and which tensors have a
    gradient."""

    job: Job
    dtype: torch.dtype
    device: torch.device

    def of(self, name: str, tokens: int) -> tuple[Call, list[Tensor]]:
        match name:
            case "norm":
                return self._norm(tokens)
            case "rotary":
                return self._rotary(tokens)
            case "gated":
                x = self._random(tokens, 1, 2 * self.job.model.ffn)
                return lambda: swiglu(x), [x]
            case "gelu":
                x = self._random(tokens, 1, self.job.model.ffn)
                return lambda: gelu(x), [x]
            case "loss":
                return self._loss(tokens)
        raise AssertionError(f"no operation of the engine is called {name}")

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device).requires_grad_()

    def _norm(self, tokens: int) -> tuple[Call, list[Tensor]]:
        spec = self.job.model
        inputs = [self._random(tokens, 1, spec.hidden), self._random(spec.hidden)]
        if spec.block == "gpt":
            inputs.append(self._random(spec.hidden))
        norm = Norm(spec)
        return lambda: norm(*inputs), inputs

    def _rotary(self, tokens: int) -> tuple[Call, list[Tensor]]:
        spec = self.job.model
        heads = (spec.heads, spec.kv_heads, spec.kv_heads)
        x = self._random(tokens, 1, sum(heads), spec.head_dim)
        cos, sin = Rope(spec, self.dtype, self.device).tables(tokens)
        return lambda: rotate_heads(x, heads, cos, sin), [x]

    def _loss(self, tokens: int) -> tuple[Call, list[Tensor]]:
        vocab = self.job.model.vocab
        logits = self._random(tokens, 1, vocab)
        labels = torch.randint(vocab, (tokens, 1), device=self.device)
        scale, comm = torch.ones((), device=self.device), Comm(grid_of(self.job), 0, self.device)
        # It writes over the logits, which stay numbers that it can be given again.
        return lambda: cross_entropy(logits, labels, scale, (0, vocab), comm), [logits]


def measure_operations(meter: Meter, alone: Job, dtype: torch.dtype, seconds: float) -> dict[str, Operation]:
    """By name, those of the model of `alone`, which is a job on one rank. seconds: for all of them."""
    functions = Functions(alone, dtype, meter.device)
    # Of those that a model has several of, the first: norms of the whole width come before those of heads.
    items = {item.operation: item for item in reversed(_passes(alone)) if item.operation}
    found = {}
    for name, item in items.items():
        _, (one, *_) = functions.of(name, 1)
        sizes = ends_first([max(1, round(size / one.nbytes)) for size in BYTES])
        forward, backward = [], []
        for tokens, within in meter.within(f"{name}, {str(dtype).partition('.')[2]}", sizes, seconds / len(items)):
            ahead, back = meter.both_ways(*functions.of(name, tokens), within)
            each = tokens * dtype.itemsize
            forward.append((item.forward * each, ahead))
            backward.append((item.backward * each, back))
        found[name] = Operation(tuple(sorted(forward)), tuple(sorted(backward)))
    return found


def _passes(job: Job) -> list[Pass]:
    kinds, kernels = {unit.kind for unit in decoder(job.model).units}, engine_software(job).kernels
    return [item for kind in sorted(kinds) for item in claims(job.model, kind, kernels).passes]
