"""A Llama and its training step in plain PyTorch, for benchmarks to stand beside: one process, no parallelism.

Of the engine it takes initial values alone, which are drawn by the names of parameters; so both start alike, and their
losses can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trigrid.blueprint import decoder
from trigrid.blueprint.parameters import localise
from trigrid.engine.random import draw
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec


class Norm(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.hidden))
        self._eps = spec.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        # In the input's format: under autocast a weight of fp32 would make this, and the residual stream, fp32.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class Block(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self._head_dim = spec.head_dim
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.attention_norm, self.ffn_norm = Norm(spec), Norm(spec)
        self.q = nn.Linear(spec.hidden, queries, bias=False)
        self.k = nn.Linear(spec.hidden, keys, bias=False)
        self.v = nn.Linear(spec.hidden, keys, bias=False)
        self.o = nn.Linear(queries, spec.hidden, bias=False)
        self.gate = nn.Linear(spec.hidden, spec.ffn, bias=False)
        self.up = nn.Linear(spec.hidden, spec.ffn, bias=False)
        self.down = nn.Linear(spec.ffn, spec.hidden, bias=False)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        y = self.attention_norm(x_BSH)
        q, k, v = (part(y).unflatten(-1, (-1, self._head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (_turned(part, cos_SD, sin_SD) for part in (q, k))
        o_BNSD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BSH = x_BSH + self.o(o_BNSD.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x_BSH)
        return x_BSH + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class PlainLlama(nn.Module):
    """tokens_BS → logits_BSV; parameters have the blueprint's names. compile: each block is one graph."""

    def __init__(self, job: Job, device: torch.device, compile: bool = False):
        super().__init__()
        spec = job.model
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job.run.precision]
        with device:
            self.embedding = nn.Embedding(spec.vocab, spec.hidden)
            self.layers = nn.ModuleList(Block(spec) for _ in range(spec.layers))
            self.final_norm = Norm(spec)
            self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
            if spec.tied:
                self.head.weight = self.embedding.weight
        rates = spec.rope_theta ** (-torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim)
        angles_SD = torch.outer(torch.arange(job.batch.sequence, dtype=torch.float64), rates).repeat(1, 2)
        self.register_buffer("cos", angles_SD.cos().to(device, self.dtype))
        self.register_buffer("sin", angles_SD.sin().to(device, self.dtype))
        declared = decoder(spec).parameters
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(draw(localise(declared[name], Layout(), 0), job.run.seed))
        if compile:
            for block in self.layers:
                block.compile(fullgraph=True, dynamic=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x = self.embedding(tokens_BS).to(self.dtype)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return self.head(self.final_norm(x))


class PlainTraining:
    """A step as anybody writes it: weights, gradients and moments in fp32, products in the job's precision by autocast,
    fused AdamW, the loss's mean over the microbatches' tokens."""

    def __init__(self, job: Job, device: torch.device, compile: bool = False):
        self.model = PlainLlama(job, device, compile)
        self._clip = job.optimizer.clip_norm
        adam = job.optimizer
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": adam.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, adam.lr, (adam.beta1, adam.beta2), adam.eps, fused=True)

    def step(self, tokens_MBS: Tensor, labels_MBS: Tensor) -> Tensor:
        """The loss of one optimizer step."""
        losses: list[Tensor] = []
        narrow = self.model.dtype is not torch.float32
        for tokens, labels in zip(tokens_MBS, labels_MBS, strict=True):
            with torch.autocast(tokens.device.type, self.model.dtype, enabled=narrow):
                logits = self.model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / len(tokens_MBS)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()


def random_batch(job: Job, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels [microbatches, micro-batch, sequence] of one process."""
    generator = torch.Generator().manual_seed(step)
    rows = job.batch.microbatches(job.parallel), job.batch.micro_batch, job.batch.sequence + 1
    drawn = torch.randint(0, job.model.vocab, rows, generator=generator).to(device)
    return drawn[..., :-1].contiguous(), drawn[..., 1:].contiguous()


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
