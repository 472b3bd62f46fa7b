"""Layers over stages, every combination of the report."""

from __future__ import annotations

from itertools import product

import pytest

from trigrid.blueprint import decoder
from trigrid.blueprint.decoder import split_layers
from trigrid.blueprint.flops import train_flops_per_token
from trigrid.spec.job import Batch, Job, Run
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec
from trigrid.spec.rules import check


def of_layers(layers: int) -> ModelSpec:
    return ModelSpec(name="thin", hidden=4, layers=layers, heads=2, kv_heads=1, head_dim=2, ffn=4, vocab=8, context=16)


def job_of(layers: int, layout: Layout) -> Job:
    return Job(model=of_layers(layers), batch=Batch(global_batch=8, sequence=8), run=Run(steps=1), parallel=layout)


@pytest.mark.parametrize("layers", range(1, 41))
def test_each_layer_once(layers: int) -> None:
    """R28, R29, R30: 1 to 40 layers, 1 to 8 ranks of 1 to 3 stages; what the rules let pass holds every layer once and
    in order, and no stage is empty."""
    blueprint = decoder(of_layers(layers))
    for pp, virtual in product(range(1, 9), range(1, 4)):
        layout = Layout(pp=pp, virtual_stages=virtual)
        stages = [blueprint.stage(layout, stage) for stage in range(layout.stages)]
        held = [unit.name for stage in stages for unit in stage]
        assert held == ["embedding", *(f"layers.{i}" for i in range(layers)), "head"], (pp, virtual)
        assert sum(split_layers(layers, layout.stages)) == layers
        schedule = "interleaved" if virtual > 1 and pp > 1 else "1f1b"
        refused = check(job_of(layers, Layout(pp=pp, virtual_stages=virtual, schedule=schedule)))
        assert refused or all(stages), (pp, virtual)
        assert not refused or layout.stages > layers or (pp == 1 and virtual > 1), (pp, virtual, refused)


@pytest.mark.parametrize("layers", [1, 7, 40])
def test_layers_of_a_stage_named_without_a_pipeline(layers: int) -> None:
    """R29: either all of them, or refused; no model is ever shorter than it was asked to be, and operations are
    counted from its units."""
    assert not check(job_of(layers, Layout(stage_layers=(layers,))))
    for named in ((layers - 1,), (layers, 0), (layers + 1,)):
        keys = {problem.key for problem in check(job_of(layers, Layout(stage_layers=named)))}
        assert keys == {"parallel.stage_layers"}
    one, all_layers = (train_flops_per_token(of_layers(n), 8, causal=False) for n in (1, layers))
    none = one - (train_flops_per_token(of_layers(2), 8, causal=False) - one)
    assert all_layers == pytest.approx(none + layers * (one - none))
