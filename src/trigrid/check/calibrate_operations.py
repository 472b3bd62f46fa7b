"""What the engine computes element by element: norms, rotary positions, activations, the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trigrid.blueprint.claims import claims
from trigrid.blueprint.decoder import decoder
from trigrid.blueprint.terms import Pass
from trigrid.check.calibrate_meter import Meter, ends_first
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

# Claimed bytes of forward that are tried: from next to nothing to beyond the caches near the cores.
BYTES = {"cpu": (2**10, *(2**n for n in range(16, 26, 2))), "cuda": tuple(2**n for n in range(20, 31, 2))}

Call = Callable[[], Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Functions:
    """The engine's operations by name, for models like the job's: of so many tokens a call, and which tensors have a
    gradient."""

    job: Job
    dtype: torch.dtype
    device: torch.device

    def of(self, name: str, tokens: int) -> tuple[Call, list[Tensor]] | None:
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
        return None

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
    items = {item.operation: item for item in reversed(_passes(alone)) if functions.of(item.operation, 1)}
    found = {}
    for name, item in items.items():
        each = item.forward * dtype.itemsize
        sizes = ends_first([max(1, round(size / each)) for size in BYTES[meter.device.type]])
        points = []
        for tokens, within in meter.within(f"{name}, {str(dtype).partition('.')[2]}", sizes, seconds / len(items)):
            ahead, back = spent(meter, functions, name, tokens, within)
            points.append((tokens * each, ahead, tokens * item.backward * dtype.itemsize, back))
        points.sort()
        found[name] = Operation(tuple((p[0], p[1]) for p in points), tuple((p[2], p[3]) for p in points))
    return found


def spent(meter: Meter, functions: Functions, name: str, tokens: int, within: float) -> tuple[float, float]:
    """Seconds of an operation forward and backward; within: see `Meter.seconds`."""
    made = functions.of(name, tokens)
    assert made
    call, inputs = made
    outputs = call()
    gradients = [torch.randn_like(x) for x in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def both() -> Sequence[Tensor]:
        found = call()
        return torch.autograd.grad(found, inputs, gradients)

    ahead = meter.seconds(call, within / 3)
    return ahead, max(meter.seconds(both, within * 2 / 3) - ahead, ahead / 10)


def _passes(job: Job) -> list[Pass]:
    kinds, kernels = {unit.kind for unit in decoder(job.model).units}, engine_software(job).kernels
    return [item for kind in sorted(kinds) for item in claims(job.model, kind, kernels).passes]
