"""Floating-point operations against counts by hand, published formulas and torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trigrid.blueprint import decoder
from trigrid.blueprint.flops import forward_flops_per_token, train_flops_per_token
from trigrid.spec.model import ModelSpec
from trigrid.spec.models import load_model

# head_dim ≠ hidden / heads, ffn and vocabulary of no round size.
LLAMA = ModelSpec(name="llama", hidden=24, layers=3, heads=6, kv_heads=2, head_dim=8, ffn=20, vocab=37, context=64)
GPT = replace(LLAMA, name="gpt", block="gpt", kv_heads=6, head_dim=4)


class PlainDecoder(nn.Module):
    """The matrix products of a decoder, written without a thought for parallelism."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(nn.ModuleDict(self._block()) for _ in range(spec.layers))
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def _block(self) -> dict[str, nn.Module]:
        spec = self.spec
        h, queries, keys = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shapes = {"q": (h, queries), "k": (h, keys), "v": (h, keys), "o": (queries, h)}
        shapes |= {"up": (h, spec.ffn), "down": (spec.ffn, h)}
        if spec.block == "llama":
            shapes["gate"] = (h, spec.ffn)
        return {name: nn.Linear(*shape, bias=spec.block == "gpt") for name, shape in shapes.items()}

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = self.embedding(tokens_BS)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x_BSH = x_BSH + self._attend(block, x_BSH)
            up = block["up"](x_BSH)
            x_BSH = x_BSH + block["down"](F.silu(block["gate"](x_BSH)) * up if "gate" in block else F.gelu(up))
        logits: Tensor = self.head(x_BSH)
        return logits

    def _attend(self, block: nn.ModuleDict, x_BSH: Tensor) -> Tensor:
        q, k, v = (block[role](x_BSH).unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2) for role in "qkv")
        k, v = (t.repeat_interleave(self.spec.heads // self.spec.kv_heads, 1) for t in (k, v))
        out: Tensor = block["o"]((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize(
    ("spec", "batch", "sequence"), [(LLAMA, 1, 16), (LLAMA, 3, 40), (GPT, 2, 24)], ids=["one", "many", "gpt"]
)
def test_torch_counts_the_same(spec: ModelSpec, batch: int, sequence: int) -> None:
    """R86: grouped queries, head_dim, gate, vocabulary: equal to what torch counts in a plain model, both ways."""
    model, tokens = PlainDecoder(spec), torch.zeros(batch, sequence, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    total = batch * sequence
    assert forward.get_total_flops() == total * forward_flops_per_token(spec, sequence, causal=False)
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both == total * train_flops_per_token(spec, sequence, causal=False)


def test_llama_3_8b_by_hand() -> None:
    """R86: multiply-adds of one token at 8,192: 32 blocks and the head; no look-up, no norm, half of the scores."""
    projections = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096
    feed_forward = 3 * 4096 * 14336
    scores = 2 * 32 * 128 * 8192
    head = 4096 * 128256
    spec = load_model("llama3-8b")
    assert forward_flops_per_token(spec, 8192, causal=False) == 2 * (32 * (projections + feed_forward + scores) + head)
    assert forward_flops_per_token(spec, 8192, causal=True) == 2 * (
        32 * (projections + feed_forward + scores / 2) + head
    )
    assert train_flops_per_token(spec, 8192, causal=True) == 3 * forward_flops_per_token(spec, 8192, causal=True)
    assert forward_flops_per_token(spec, 8192, causal=False) == 19_304_284_160


@pytest.mark.parametrize("name", ["llama3.1-405b", "qwen3-0.6b", "llama3.2-1b", "gpt3-175b", "mistral-7b"])
def test_six_per_parameter_and_twelve_per_score(name: str) -> None:
    """R86: 6·N + 12·L·H·Q·T of PaLM, appendix B; N leaves out the embedding, positions and norms."""
    spec, sequence = load_model(name), 4096
    blueprint = decoder(spec)
    matrices = sum(
        p.numel
        for unit in blueprint.units
        for p in unit.parameters
        if len(p.shape) == 2 and p.role not in ("embedding", "positions")
    )
    expected = 6 * matrices + 12 * spec.layers * spec.heads * spec.head_dim * sequence
    assert train_flops_per_token(spec, sequence, causal=False) == expected


def test_a_tied_head_is_multiplied_all_the_same() -> None:
    """R86."""
    tied = replace(LLAMA, tied=True)
    assert forward_flops_per_token(tied, 32, causal=True) == forward_flops_per_token(LLAMA, 32, causal=True)
