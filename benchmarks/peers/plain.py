"""The baseline: the same Llama in plain PyTorch, in one process or under DistributedDataParallel."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import LAYOUTS, RANK, WORKLOAD, WORLD, Turns, Workload, adamw_options, held, microbatches, reference_weights
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, WORKLOAD.norm_eps)


def rope_tables(w: Workload = WORKLOAD) -> tuple[Tensor, Tensor]:
    frequencies = 1.0 / w.rope_theta ** (torch.arange(0, w.head_dim, 2).float() / w.head_dim)
    angles = torch.outer(torch.arange(w.sequence).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self, w: Workload):
        super().__init__()
        kv = w.kv_heads * w.head_dim
        self.q_proj = nn.Linear(w.hidden, w.hidden, bias=False)
        self.k_proj = nn.Linear(w.hidden, kv, bias=False)
        self.v_proj = nn.Linear(w.hidden, kv, bias=False)
        self.o_proj = nn.Linear(w.hidden, w.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, sequence, _ = x.shape
        products = (layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.view(rows, sequence, -1, WORKLOAD.head_dim).transpose(1, 2) for y in products)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).reshape(rows, sequence, -1))


class FeedForward(nn.Module):
    def __init__(self, w: Workload):
        super().__init__()
        self.gate_proj = nn.Linear(w.hidden, w.ffn, bias=False)
        self.up_proj = nn.Linear(w.hidden, w.ffn, bias=False)
        self.down_proj = nn.Linear(w.ffn, w.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, w: Workload = WORKLOAD):
        super().__init__()
        self.self_attn, self.mlp = Attention(w), FeedForward(w)
        self.input_layernorm, self.post_attention_layernorm = Norm(w.hidden), Norm(w.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, w: Workload):
        super().__init__()
        self.embed_tokens = nn.Embedding(w.vocab, w.hidden)
        self.layers = nn.ModuleList(Block(w) for _ in range(w.layers))
        self.norm = Norm(w.hidden)


class Llama(nn.Module):
    """Its parameters have the names of transformers' Llama."""

    def __init__(self, w: Workload = WORKLOAD):
        super().__init__()
        self.model, self.lm_head = Body(w), nn.Linear(w.hidden, w.vocab, bias=False)
        cos, sin = rope_tables(w)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x, self.cos, self.sin)
        return self.lm_head(self.model.norm(x))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="single", choices=["single", "ddp2"])
    cut = LAYOUTS[parser.parse_args().layout]
    turns = Turns("")
    model = Llama()
    model.load_state_dict(reference_weights())
    wrapped: nn.Module = model
    if WORLD > 1:
        dist.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options())
    turns.ready(held(model.parameters()))
    for step in turns:
        batches = microbatches(step, RANK, cut)
        with turns.timed():
            total = torch.zeros(())
            for number, (tokens, targets) in enumerate(batches, 1):
                if WORLD > 1:
                    wrapped.require_backward_grad_sync = number == len(batches)
                loss = mean_loss(wrapped(tokens), targets) / len(batches)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if WORLD > 1:
            dist.all_reduce(total)
        turns.loss(total / WORLD)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
