"""Attention within documents: what is packed into one row computes what each document computes alone."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from trigrid.blueprint import decoder
from trigrid.blueprint.parameters import localise
from trigrid.engine.comm import Comm
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.units import Microbatch
from trigrid.grid import Grid
from trigrid.models.attention import DocumentMasks
from trigrid.models.decoder import Decoder
from trigrid.spec.cluster import Cluster
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

SPEC = ModelSpec(name="small", hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61, context=64)
LENGTHS = (5, 1, 9, 3)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    parameters = decoder(SPEC).parameters.values()
    return {p.name: torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2 + 0.1 for p in parameters}


def last_block(weights: Mapping[str, Tensor], tokens_SB: Tensor, documents_SB: Tensor | None) -> Tensor:
    """What the blocks make of the tokens [S, B, H]."""
    layout = Layout()
    tp = TensorParallel(Comm(Grid(layout, Cluster()), 0), sequence_parallel=False)
    model = Decoder(SPEC, tp, torch.float64, torch.device("cpu"))
    microbatch = Microbatch(tokens_SB, tokens_SB, torch.ones(()), documents_SB)
    x = tokens_SB
    for unit in decoder(SPEC).units[:-1]:
        function = model.function(unit, {p.role: localise(p, layout, 0) for p in unit.parameters})
        x = function({p.role: weights[p.name] for p in unit.parameters}, x, microbatch)
    return x


def test_packed_documents_compute_what_they_compute_alone(weights: dict[str, Tensor]) -> None:
    """Rotary positions count from the row's first token: only differences of positions matter."""
    tokens_SB = torch.randint(0, SPEC.vocab, (sum(LENGTHS), 2), generator=torch.Generator().manual_seed(2))
    numbers_S = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    # The second row is one document.
    documents_SB = torch.stack([numbers_S, torch.zeros_like(numbers_S)], dim=1)
    packed_SBH = last_block(weights, tokens_SB, documents_SB)
    alone = [last_block(weights, part, None) for part in tokens_SB[:, :1].split(LENGTHS)]
    torch.testing.assert_close(packed_SBH[:, :1], torch.cat(alone), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(packed_SBH[:, 1:], last_block(weights, tokens_SB[:, 1:], None), rtol=1e-11, atol=1e-11)
    across_SBH = last_block(weights, tokens_SB[:, :1], None)
    assert not torch.allclose(packed_SBH[LENGTHS[0] :, :1], across_SBH[LENGTHS[0] :], atol=1e-3)


def test_blocks_share_a_mask_as_long_as_one_keeps_it() -> None:
    documents_SB = torch.tensor([[0], [0], [1]])
    microbatch = Microbatch(documents_SB, documents_SB, torch.ones(()), documents_SB)
    masks = DocumentMasks()
    kept = masks.of(microbatch, torch.bfloat16)
    assert kept is not None
    assert kept.dtype == torch.bfloat16
    far = -torch.inf
    assert kept[0, 0].tolist() == [[0.0, far, far], [0.0, 0.0, far], [far, far, 0.0]]
    assert masks.of(microbatch, torch.bfloat16) is kept
    storage = torch.multiprocessing.reductions.StorageWeakRef(kept.untyped_storage())
    del kept
    gc.collect()
    assert storage.expired()
