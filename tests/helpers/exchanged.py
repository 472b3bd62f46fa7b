"""A small model in a Hugging Face folder, with a tokenizer, for tests of the commands around checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from trigrid.data.bpe import train_bpe
from trigrid.models.huggingface import tensors
from trigrid.spec.model import ModelSpec
from trigrid.spec.to_huggingface import config_of_model

WORDS = "the cat sat on the mat and naïve mice ran — " * 3
SPEC = ModelSpec(name="small", hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, vocab=260, context=32)


def huggingface_folder(folder: Path, spec: ModelSpec = SPEC) -> Path:
    """Random weights of large spread, as transformers would save them, and a tokenizer of 260 entries."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    shapes = {name: next(iter(inside.values())).shape for name, inside in tensors(spec).items()}
    weights = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of_model(spec, "float32", 0)), encoding="utf-8")
    train_bpe(iter([WORDS]), spec.vocab, folder / "tokenizer.json")
    return folder
