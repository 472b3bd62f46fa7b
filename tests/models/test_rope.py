"""Rotary tables against those of transformers, with Llama-3's scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.transformers_reference import Precision, arithmetic
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trigrid.engine.zero import TORCH_DTYPE
from trigrid.models.rope import Rope
from trigrid.spec.huggingface import model_from_config
from trigrid.spec.model import ModelSpec

CPU = torch.device("cpu")
LLAMA31: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama 3.1": (128, LLAMA31),
    "llama 3.2": (64, LLAMA31 | {"factor": 32.0}),
    "short context": (32, LLAMA31 | {"rope_theta": 10_000.0, "original_max_position_embeddings": 48}),
    "other bands": (64, LLAMA31 | {"low_freq_factor": 2.0, "high_freq_factor": 32.0}),
}


def both(rope: str, precision: Precision, folder: Path) -> tuple[ModelSpec, LlamaRotaryEmbedding]:
    """A model that trigrid read from the configuration that transformers wrote, and the module of transformers."""
    head_dim, parameters = ROPES[rope]
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131_072, rope_parameters=parameters)
    config.save_pretrained(folder)
    with arithmetic(precision):
        return model_from_config(folder), LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("rope", list(ROPES))
def test_llama3_frequencies(rope: str, precision: Precision, tmp_path: Path) -> None:
    spec, theirs = both(rope, precision, tmp_path)
    # At position 1 the angles are the frequencies, all at most 1.
    cos, sin = Rope(spec, torch.float64, CPU).tables(2)
    ours = torch.atan2(sin, cos)[1].flatten()
    tolerance = 1e-6 if precision == "fp32" else 1e-13
    torch.testing.assert_close(ours, theirs.inv_freq.double(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("rope", list(ROPES))
def test_all_three_bands_occur(rope: str, tmp_path: Path) -> None:
    spec, theirs = both(rope, "fp64", tmp_path)
    assert spec.rope_scaling is not None
    factor = spec.rope_scaling.factor
    plain = spec.rope_theta ** -(torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim)
    stretch = plain / theirs.inv_freq
    assert stretch[0].item() == pytest.approx(1.0)
    assert ((stretch > 1.01) & (stretch < 0.99 * factor)).any()
    assert stretch[-1].item() == pytest.approx(factor)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("rope", list(ROPES))
def test_tables(rope: str, precision: Precision, tmp_path: Path) -> None:
    """transformers rounds an angle before it takes its cosine: in fp32 that costs more the larger the position."""
    spec, theirs = both(rope, precision, tmp_path)
    dtype, sequence = TORCH_DTYPE[precision], 400
    with arithmetic(precision):
        expected = theirs(torch.zeros((), dtype=dtype), torch.arange(sequence)[None])
    for table, other in zip(Rope(spec, dtype, CPU).tables(sequence), expected, strict=True):
        assert table.dtype == other.dtype == dtype
        # Theirs has every angle twice.
        assert (table.flatten(1).repeat(1, 2) - other[0]).abs().amax() <= sequence * torch.finfo(dtype).eps


def test_tables_grow(tmp_path: Path) -> None:
    """A longer sequence after a shorter one, and the reverse."""
    spec, _ = both("short context", "fp64", tmp_path)
    rope = Rope(spec, torch.float64, CPU)
    short, long, short_again = rope.tables(5), rope.tables(9), rope.tables(5)
    for few, many, again in zip(short, long, short_again, strict=True):
        assert many.shape == (9, 1, 1, spec.head_dim // 2)
        assert torch.equal(few, many[:5])
        assert torch.equal(few, again)
