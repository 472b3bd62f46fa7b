"""Operations of the model that is built, as torch counts them, against those that plans and MFU reckon with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.jobs import named, small_job
from torch.utils.flop_counter import FlopCounterMode

from trigrid.blueprint.flops import train_flops_per_token
from trigrid.check.parity import batch, share
from trigrid.engine.comm import Comm
from trigrid.grid import grid_of
from trigrid.models.build import build_engine

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tied": True, "qk_norm": True, "qkv_bias": True},
    "wide-heads": {"head_dim": 24, "ffn": 52, "vocab": 131},
    "gpt": {"block": "gpt", "kv_heads": 8, "tied": True},
    "gpt-untied": {"block": "gpt", "kv_heads": 8, "head_dim": 24},
}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("fused", [True, False])
def test_the_built_model_does_what_is_reckoned(shape: str, fused: bool) -> None:
    """R86: the whole step of the engine. Torch's counter does not know the CPU's fused attention: with that the scores
    are left out, without it the count is all that is reckoned."""
    job = small_job(named("tp1"), **SHAPES[shape])
    job = replace(job, run=replace(job.run, attention_dropout=0.0 if fused else 0.1))
    engine = build_engine(job, Comm(grid_of(job), 0), torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        engine.accumulate(*(share(rows, job, 0) for rows in batch(job, 0)), consumed=0)
    spec, length = job.model, job.batch.sequence
    tokens = job.batch.global_batch * length
    scores = 4 * spec.layers * spec.heads * spec.head_dim * length
    unseen = 3 * scores if fused else 0
    assert counter.get_total_flops() == tokens * (train_flops_per_token(spec, length, causal=False) - unseen)
