"""Jobs as other trainers read them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest

from trigrid.errors import Refused
from trigrid.job import job_from_text
from trigrid.job.export import deepspeed_config, export_job, megatron_arguments, torchtitan_config
from trigrid.job.spellings import SPELLINGS
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout

# What our job has no key for, or calls the same.
MEGATRON_ONLY = {
    "normalization",
    "position_embedding_type",
    "swiglu",
    "disable_bias_linear",
    "sequence_parallel",
    "recompute_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "lr",
    "lr_decay_style",
    "weight_decay",
    "seed",
}
TITAN_ONLY = {
    "model.name",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "lr_scheduler.decay_type",
}
DEEPSPEED_ONLY = {"optimizer.type", "scheduler.type"}


def job(**layout: object) -> Job:
    base = job_from_text(
        '[model]\nname = "llama3-70b"\n[batch]\nsequence = 4096\nglobal_batch = 64\n[run]\nsteps = 100\n'
        "[optimizer]\nwarmup_steps = 10\n"
    )
    return replace(base, parallel=Layout(**{"tp": 8, "pp": 4, "dp": 2, **layout}))  # type: ignore[arg-type]


def dotted(table: dict[str, object], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in table.items():
        found |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return found


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"schedule": "interleaved", "virtual_stages": 5},
        {"zero": 3, "recompute": "full", "dp_replicate": 2},
        {"pp": 3},
    ],
)
def test_megatron_spells_its_arguments_so(layout: dict[str, object]) -> None:
    names = {name.replace("-", "_") for name in megatron_arguments(job(**layout))}
    assert names <= SPELLINGS["Megatron-LM"].keys() | MEGATRON_ONLY
    text = export_job(job(**layout), "megatron").text
    assert "--tensor-model-parallel-size 8 \\\n" in text
    assert "--num-query-groups 8 \\\n" in text
    assert text.endswith("--seed 0")


def test_megatron_takes_uneven_stages_as_a_layout() -> None:
    uneven = megatron_arguments(job(pp=3))["pipeline-model-parallel-layout"]
    assert uneven == "E" + "t" * 26 + "|" + "t" * 28 + "|" + "t" * 26 + "L" or str(uneven).count("t") == 80
    assert (
        megatron_arguments(job(schedule="interleaved", virtual_stages=5))["num-layers-per-virtual-pipeline-stage"] == 4
    )
    sharded = megatron_arguments(job(zero=3))
    assert sharded["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert "use-distributed-optimizer" not in megatron_arguments(job(zero=0))


@pytest.mark.parametrize(
    "layout", [{}, {"zero": 3, "dp_replicate": 2, "pp": 1}, {"schedule": "zbv", "virtual_stages": 2}]
)
def test_torchtitan_spells_its_keys_so(layout: dict[str, object]) -> None:
    config = torchtitan_config(job(**layout))
    assert dotted(config) <= SPELLINGS["torchtitan"].keys() | TITAN_ONLY  # type: ignore[arg-type]
    assert tomllib.loads(export_job(job(**layout), "torchtitan").text) == config


def test_torchtitan_counts_a_local_batch_over_the_pipeline() -> None:
    training = torchtitan_config(job())["training"]
    assert (training["local_batch_size"], training["global_batch_size"]) == (32, 64)
    assert torchtitan_config(job(pp=1))["training"]["local_batch_size"] == 1
    copies = torchtitan_config(job(zero=3, dp=4, dp_replicate=2))["parallelism"]
    assert (copies["data_parallel_replicate_degree"], copies["data_parallel_shard_degree"]) == (2, 2)
    assert torchtitan_config(job(zero=0))["parallelism"]["data_parallel_shard_degree"] == 1


def test_deepspeed_spells_its_keys_so() -> None:
    config = deepspeed_config(job())
    assert dotted(config) <= SPELLINGS["DeepSpeed"].keys() | DEEPSPEED_ONLY
    assert json.loads(export_job(job(), "deepspeed").text) == config
    assert config["train_batch_size"] == 2 * 1 * 32
    assert export_job(job(), "deepspeed").notes[1] == "pipeline stages are given in code: PipelineModule(num_stages=4)"


def test_what_another_trainer_cannot_do_is_refused() -> None:
    with pytest.raises(
        Refused, match=r"parallel\.schedule = zbv: Megatron-LM has no such schedule; nearest legal: 1f1b"
    ):
        export_job(job(schedule="zbv", virtual_stages=2), "megatron")
    with pytest.raises(Refused, match=r"parallel\.schedule = zb-h1: torchtitan has no such schedule"):
        export_job(job(schedule="zb-h1"), "torchtitan")
    with pytest.raises(Refused, match=r"parallel\.zero = 3: DeepSpeed refuses ZeRO-2 and ZeRO-3 with pipelines"):
        export_job(job(zero=3), "deepspeed")
