"""A single process computes what transformers computes: logits, loss, gradients and AdamW's steps.

Distances are ‖ours − theirs‖ ÷ ‖theirs‖, for the logits and for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.transformers_reference import Precision, Reference
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.grid import Grid
from trigrid.models.build import build_engine
from trigrid.models.generate import LanguageModel
from trigrid.spec.job import Batch, Job, Optimizer, Run
from trigrid.spec.layout import Layout

CPU = torch.device("cpu")
VOCAB = 97
MICROBATCHES, ROWS, SEQUENCE = 3, 2, 80
TOLERANCE: dict[Precision, float] = {"fp32": 1e-5, "fp64": 1e-12}

# Weights large enough that attention is far from uniform, and an epsilon that is felt.
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.18,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}
# Wavelengths run from 6 to 35,000 positions; 12 and 48 divide the three bands.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
MODELS: dict[str, PretrainedConfig] = {
    "grouped": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL | {"tie_word_embeddings": True}),
    "ungrouped": LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "wide heads": LlamaConfig(**SMALL | {"head_dim": 20}),
    "llama3 rope": LlamaConfig(**SMALL | {"head_dim": 32, "rope_parameters": LLAMA3_ROPE}),
    "qwen3": Qwen3Config(**SMALL | {"head_dim": 16}),
    "qwen2": Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
    "mistral": MistralConfig(
        **SMALL | {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        sliding_window=None,
    ),
}

MODELS["gpt2"] = GPT2Config(
    n_embd=48,
    n_inner=80,
    n_layer=2,
    n_head=4,
    vocab_size=VOCAB,
    n_positions=512,
    initializer_range=0.18,
    layer_norm_epsilon=1e-3,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
)

OPTIMIZER = Optimizer(lr=0.05, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.4, clip_norm=0.5)
"""The rate moves weights by their own size; with this epsilon AdamW's first step is more than the gradient's sign."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # On a busy machine threads that wait for each other cost these small products a factor of ten and more.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["fp32", "fp64"])
def precision(request: pytest.FixtureRequest) -> Precision:
    chosen: Precision = request.param
    return chosen


@pytest.fixture(params=list(MODELS))
def reference(request: pytest.FixtureRequest, precision: Precision, tmp_path: Path) -> Reference:
    return Reference.make(MODELS[request.param], precision, tmp_path)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels, [microbatches, rows, sequence]; the microbatches differ much in how many labels count."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB, (MICROBATCHES, ROWS, SEQUENCE + 1), generator=generator)
    tokens, labels = text[..., :-1], text[..., 1:].clone()
    labels[0, :, 5:] = -100
    labels[1][torch.rand(ROWS, SEQUENCE, generator=generator) < 0.3] = -100
    labels[2, 0] = -100
    return tokens, labels


def comm_of(layout: Layout) -> Comm:
    return Comm(Grid(layout), 0)


def engine_with(reference: Reference, layout: Layout) -> Engine:
    """A single process's engine that starts from the weights of `reference`."""
    job = Job(
        model=reference.spec,
        batch=Batch(global_batch=MICROBATCHES * ROWS, sequence=SEQUENCE, micro_batch=ROWS),
        run=Run(steps=1, precision=reference.precision, device="cpu"),
        parallel=layout,
        optimizer=OPTIMIZER,
    )
    values = reference.values()
    return build_engine(job, comm_of(layout), CPU, lambda local: values[local.parameter.name])


def by_name(engine: Engine, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the parameters in `flat`, which holds an array for each bucket of a single process."""
    return {
        entry.local.parameter.name: flat[name][entry.offset : entry.stop].view(entry.local.shape).clone()
        for name, bucket in engine.buckets.items()
        for entry in bucket.layout.entries
    }


def distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    difference = torch.linalg.vector_norm(ours.double() - theirs.double())
    return float(difference / torch.linalg.vector_norm(theirs.double()))


def distances(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """Distance of each parameter; both sides must have the same ones.

    Where theirs is a millionth of the whole or less it is rounding, as the gradient of a bias on keys without rotary
    positions: then ours must be so, too.
    """
    assert ours.keys() == theirs.keys()
    whole = sum(float(torch.linalg.vector_norm(t.double())) for t in theirs.values())
    found = {}
    for name in ours:
        is_rounding = float(torch.linalg.vector_norm(theirs[name].double())) <= 1e-6 * whole
        small = float(torch.linalg.vector_norm(ours[name].double())) <= 1e-6 * whole
        found[name] = (0.0 if small else math.inf) if is_rounding else distance(ours[name], theirs[name])
    return found


def beyond(distances: Mapping[str, float], tolerance: float) -> dict[str, float]:
    """Those that are too far, or not a number."""
    return {name: far for name, far in distances.items() if not far <= tolerance}


def test_logits(reference: Reference) -> None:
    tokens, _ = batch()
    tokens = tokens.flatten(0, 1)
    ours = LanguageModel(reference.spec, reference.values()).logits(tokens)
    assert distance(ours, reference.logits(tokens)) <= TOLERANCE[reference.precision]


def check_steps(reference: Reference, layout: Layout, steps: int) -> None:
    """After each step compare loss, gradients, norm and new weights of an engine and of transformers."""
    tolerance = TOLERANCE[reference.precision]
    tokens, labels = batch()
    rows, row_labels = tokens.flatten(0, 1), labels.flatten(0, 1)
    engine = engine_with(reference, layout)
    parameters = list(reference.model.parameters())
    adamw = adamw_of(parameters)

    before = reference.loss(rows, row_labels)
    for _ in range(steps):
        engine.accumulate(tokens, labels)
        flat = engine.sum_gradients()
        gradients = by_name(engine, flat)
        result = engine.update(flat, OPTIMIZER.lr)

        adamw.zero_grad()
        loss = reference.loss(rows, row_labels)
        loss.backward()
        assert result.updated
        assert result.loss == pytest.approx(loss.item(), rel=tolerance)
        assert beyond(distances(gradients, reference.gradients()), tolerance) == {}

        norm = clip(parameters)
        adamw.step()
        assert result.gradient_norm == pytest.approx(norm, rel=tolerance)
        weights = by_name(engine, {name: bucket.master for name, bucket in engine.buckets.items()})
        assert beyond(distances(weights, reference.values()), tolerance) == {}

    after = reference.loss(rows, row_labels)
    assert abs(after.item() / before.item() - 1) > 0.05
    assert engine.evaluate(tokens, labels) == pytest.approx(after.item(), rel=tolerance)


def adamw_of(parameters: Sequence[Tensor]) -> torch.optim.AdamW:
    """torch's AdamW, decaying matrices only."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        fused=False,
    )


def clip(parameters: Sequence[Tensor]) -> float:
    """Clip with torch's function; returns the norm before."""
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    assert norm > 2 * OPTIMIZER.clip_norm, "clipping would not be seen"
    # torch divides by norm + 1e-6; the factor takes that back, which fp64 would see.
    torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_norm * (norm + 1e-6) / norm)
    return norm


def test_step(reference: Reference) -> None:
    check_steps(reference, Layout(), steps=1)


LAYOUTS = {"zero 3": Layout(zero=3), "recompute": Layout(recompute="full")}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("model", ["grouped", "tied"])
def test_step_of_other_engines(model: str, layout: str, precision: Precision, tmp_path: Path) -> None:
    check_steps(Reference.make(MODELS[model], precision, tmp_path), LAYOUTS[layout], steps=1)


def test_three_steps(tmp_path: Path) -> None:
    """The first step says nothing of the betas. In fp32 gradients would part: AdamW amplifies rounding."""
    check_steps(Reference.make(MODELS["grouped"], "fp64", tmp_path), Layout(), steps=3)


def test_scaling_is_felt(tmp_path: Path) -> None:
    """Without its scaling the Llama-3 case would be far away, so the agreement above says something about it."""
    reference = Reference.make(MODELS["llama3 rope"], "fp64", tmp_path)
    tokens, _ = batch()
    tokens = tokens.flatten(0, 1)
    unscaled = replace(reference.spec, rope_scaling=None)
    assert distance(LanguageModel(unscaled, reference.values()).logits(tokens), reference.logits(tokens)) > 0.1
