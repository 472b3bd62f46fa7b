"""A Llama-style decoder in plain torch modules, and its training: alone, and by torch's own parallelism.

Nothing here uses the engine, but for the initial values, which are drawn by the names of parameters. Modules are
named as the blueprint names parameters, so that gradients can be compared by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

from trigrid.blueprint import decoder
from trigrid.blueprint.parameters import localise
from trigrid.check import parity
from trigrid.check.parity import STEPS, Array, Reference, Sabotage
from trigrid.engine.random import draw
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self._eps).sqrt() * self.weight


class Block(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        hidden, queries, keys = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.attention_norm = Norm(hidden, spec.norm_eps)
        self.q = nn.Linear(hidden, queries, bias=spec.qkv_bias)
        self.k = nn.Linear(hidden, keys, bias=spec.qkv_bias)
        self.v = nn.Linear(hidden, keys, bias=spec.qkv_bias)
        if spec.qk_norm:
            self.q_norm = Norm(spec.head_dim, spec.norm_eps)
            self.k_norm = Norm(spec.head_dim, spec.norm_eps)
        self.o = nn.Linear(queries, hidden, bias=False)
        self.ffn_norm = Norm(hidden, spec.norm_eps)
        self.gate = nn.Linear(hidden, spec.ffn, bias=False)
        self.up = nn.Linear(hidden, spec.ffn, bias=False)
        self.down = nn.Linear(spec.ffn, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH = self.attention_norm(x_BSH)
        q, k, v = (layer(y_BSH).unflatten(-1, (-1, self.spec.head_dim)) for layer in (self.q, self.k, self.v))
        if self.spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        x_BSH = x_BSH + self.o(attend(turned(q, self.spec.rope_theta), turned(k, self.spec.rope_theta), v))
        y_BSH = self.ffn_norm(x_BSH)
        return x_BSH + self.down(F.silu(self.gate(y_BSH)) * self.up(y_BSH))


def turned(x_BSND: Tensor, theta: float) -> Tensor:
    """Rotary positions, as multiplication of complex numbers."""
    half = x_BSND.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles_SD = torch.outer(torch.arange(x_BSND.shape[1], dtype=torch.float64), rates)
    turns = torch.polar(torch.ones_like(angles_SD), angles_SD)[None, :, None]
    pairs = torch.complex(x_BSND[..., :half].contiguous(), x_BSND[..., half:].contiguous()) * turns
    return torch.cat((pairs.real, pairs.imag), -1)


def attend(q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor) -> Tensor:
    """Causal attention, written out; each KV head serves as many query heads."""
    served = q_BSND.shape[2] // k_BSMD.shape[2]
    k_BSND, v_BSND = (t.repeat_interleave(served, dim=2) for t in (k_BSMD, v_BSMD))
    scores_BNQK = torch.einsum("bqnd,bknd->bnqk", q_BSND, k_BSND) / math.sqrt(q_BSND.shape[-1])
    ahead = torch.ones(scores_BNQK.shape[-2:], dtype=torch.bool).triu(1)
    shares_BNQK = scores_BNQK.masked_fill(ahead, -torch.inf).softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", shares_BNQK, v_BSND).flatten(2)


class Layers(nn.Module):
    """Blocks by their number in the model, which is their name on any stage."""

    def __init__(self, spec: ModelSpec, numbers: range):
        super().__init__()
        for number in numbers:
            self.add_module(str(number), Block(spec))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


class PlainDecoder(nn.Module):
    """tokens_BS → logits_BSV; or the `stage` of `stages` equal ones of it."""

    def __init__(self, job: Job, stage: int = 0, stages: int = 1):
        super().__init__()
        spec = job.model
        each = spec.layers // stages
        first, last = stage == 0, stage == stages - 1
        self.embedding = nn.Embedding(spec.vocab, spec.hidden) if first else None
        self.layers = Layers(spec, range(stage * each, spec.layers if last else (stage + 1) * each))
        self.final_norm = Norm(spec.hidden, spec.norm_eps) if last else None
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False) if last else None
        if spec.tied:
            assert self.head is not None
            assert self.embedding is not None
            self.head.weight = self.embedding.weight
        self.double()
        declared = decoder(spec).parameters
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(draw(localise(declared[name], Layout(), 0), job.run.seed))

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.layers(x)
        return self.head(self.final_norm(x)) if self.head is not None else x


def summed_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum, and not mean, of the cross-entropies: only the sum is the same however a batch is cut."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=-100, reduction="sum")


ForwardBackward = Callable[[Tensor, Tensor, int], float]
"""(tokens, labels [global batch, sequence], valid labels among them) → the loss; leaves gradients behind."""


def train(job: Job, model: nn.Module, forward_backward: ForwardBackward, pipeline: bool = False) -> Reference:
    """STEPS steps of AdamW. pipeline: the ranks of the world hold one stage each, else all hold all, or shards of
    DTensors."""
    spec = job.optimizer
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if (p.ndim > 1) == decay], "weight_decay": rate}
        for decay, rate in ((True, spec.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps)
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        tokens, labels = parity.batch(job, step)
        losses.append(forward_backward(tokens, labels, max(1, int((labels >= 0).sum()))))
        here = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        assert here.keys() == parameters.keys(), parameters.keys() - here.keys()
        gradients.append(of_all_stages(here, pipeline))
        norms.append(total_norm(here, pipeline))
        # torch's clip_grad_norm_ divides by the norm plus 1e-6, which alone would be beyond law 1.
        if 0 < spec.clip_norm < norms[-1]:
            for gradient in here.values():
                gradient.mul_(spec.clip_norm / norms[-1])
        adamw.step()
        adamw.zero_grad()
    return Reference(tuple(losses), tuple(norms), tuple(gradients), of_all_stages(parameters, pipeline))


def total_norm(gradients: Mapping[str, Tensor], pipeline: bool) -> float:
    norm = whole(get_total_norm(gradients.values()))
    if pipeline:
        dist.all_reduce(norm := norm.square())
        norm = norm.sqrt()
    return norm.item()


def of_all_stages(held: Mapping[str, Tensor], pipeline: bool) -> dict[str, Array]:
    """Global arrays by name. Every rank must call it."""
    mine = {name: whole(tensor).numpy().copy() for name, tensor in held.items()}
    if not pipeline:
        return mine
    stages: list[dict[str, Array]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(stages, mine)
    return {name: array for stage in stages for name, array in stage.items()}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def alone(rank: int, job: Job, sabotage: Sabotage = nullcontext) -> Reference:
    """One process, the whole batch in one pass, within `sabotage`."""
    with sabotage():
        return _alone(job)


def _alone(job: Job) -> Reference:
    model = PlainDecoder(job)

    def forward_backward(tokens: Tensor, labels: Tensor, valid: int) -> float:
        loss = summed_loss(model(tokens), labels) / valid
        loss.backward()
        return loss.item()

    return train(job, model, forward_backward)


def by_fully_shard(rank: int, job: Job) -> Reference:
    """FSDP2 over the whole world, weights gathered for each use and gradients reduced for each microbatch."""
    ranks = dist.get_world_size()
    model = PlainDecoder(job)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.layers.children():
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())

    def forward_backward(tokens: Tensor, labels: Tensor, valid: int) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for rows, targets in microbatches(job, tokens.chunk(ranks)[rank], labels.chunk(ranks)[rank]):
            # FSDP takes the mean of the ranks' gradients, where the gradient of a sum over tokens is their sum.
            loss = summed_loss(model(rows), targets) / valid
            (loss * ranks).backward()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item()

    return train(job, model, forward_backward)


def by_pipelining(rank: int, job: Job) -> Reference:
    """One stage of torch's 1F1B on each rank."""
    stages = dist.get_world_size()
    model = PlainDecoder(job, rank, stages)
    pieces = job.batch.global_batch // job.batch.micro_batch
    scale = [1]

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(logits, labels) / scale[0]

    stage = PipelineStage(model, rank, stages, torch.device("cpu"))
    # By default gradients are divided by the number of microbatches, as if each loss were a mean over as many tokens.
    schedule = Schedule1F1B(stage, pieces, loss_fn=loss_of, scale_grads=False)

    def forward_backward(tokens: Tensor, labels: Tensor, valid: int) -> float:
        scale[0] = valid
        total = torch.zeros((), dtype=torch.float64)
        if rank == 0:
            schedule.step(tokens)
        else:
            losses: list[Tensor] = []
            schedule.step(target=labels, losses=losses)
            if rank == stages - 1:
                assert len(losses) == pieces
                total += torch.stack(losses).sum().detach()
        dist.all_reduce(total)
        return total.item()

    return train(job, model, forward_backward, pipeline=True)


def by_tensor_parallelism(rank: int, job: Job) -> Reference:
    """DTensor's column, row and sequence parallelism over the whole world, loss on logits that stay cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = PlainDecoder(job)
    parallelize_module(model, mesh, plan_of(model))
    assert all(isinstance(p, DTensor) for p in model.parameters())

    def forward_backward(tokens: Tensor, labels: Tensor, valid: int) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for rows, targets in microbatches(job, tokens, labels):
            with loss_parallel():
                loss = summed_loss(model(rows), replicated(targets, mesh)) / valid
                loss.backward()
            total += whole(loss)
        return total.item()

    return train(job, model, forward_backward)


def plan_of(model: PlainDecoder) -> dict[str, ParallelStyle]:
    """Sequence parallelism between the regions; norms of heads see whole sequences of the heads of their rank."""
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "final_norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for name, _ in model.layers.named_children():
        at = f"layers.{name}."
        plan |= {at + role: SequenceParallel() for role in ("attention_norm", "ffn_norm")}
        plan |= {at + role: ColwiseParallel(input_layouts=Shard(1)) for role in ("q", "k", "v", "gate", "up")}
        plan |= {at + role: RowwiseParallel(output_layouts=Shard(1)) for role in ("o", "down")}
        plan |= {
            at + role: SequenceParallel(sequence_dim=2, use_local_output=True)
            for role in ("q_norm", "k_norm")
            if hasattr(model.layers.get_submodule(name), role)
        }
    return plan


def replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def microbatches(job: Job, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = job.batch.micro_batch
    return list(zip(tokens.split(size), labels.split(size), strict=True))
