"""Jobs that break each rule, with the message a user reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trigrid.spec.job import Batch, Job, Run
from trigrid.spec.layout import Layout
from trigrid.spec.model import Experts, LatentAttention, ModelSpec, RopeScaling

SOUND = Job(
    model=ModelSpec(
        name="sound", hidden=192, layers=4, heads=12, kv_heads=4, head_dim=16, ffn=512, vocab=1000, context=256
    ),
    batch=Batch(global_batch=32, sequence=128, micro_batch=2),
    run=Run(steps=10),
    parallel=Layout(tp=2, pp=2, dp=4),
)


def changed(changes: dict[str, Any], job: Any = SOUND) -> Any:
    """`job` with the fields that the dotted keys name replaced."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        job = replace(job, **{name: changed({rest: value}, getattr(job, name)) if rest else value})
    return job


COUNT = f"must be from 1 to {2**31 - 1}; nearest legal: 1"
SCALING = RopeScaling(factor=8.0)

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    # single fields
    ({"model.hidden": 0}, [f"model.hidden = 0: {COUNT}"]),
    ({"batch.micro_batch": -3}, [f"batch.micro_batch = -3: {COUNT}"]),
    ({"cluster.gpus_per_node": 0}, [f"cluster.gpus_per_node = 0: {COUNT}"]),
    ({"run.steps": 2**31}, [f"run.steps = {2**31}: must be from 1 to {2**31 - 1}; nearest legal: {2**31 - 1}"]),
    (
        {"optimizer.warmup_steps": -1},
        [f"optimizer.warmup_steps = -1: must be from 0 to {2**31 - 1}; nearest legal: 0"],
    ),
    ({"run.seed": -1}, [f"run.seed = -1: must be from 0 to {2**63 - 1}; nearest legal: 0"]),
    (
        {"model.rope_scaling": replace(SCALING, original_context=0)},
        [f"model.rope_scaling.original_context = 0: {COUNT}"],
    ),
    ({"optimizer.lr": 0.0}, ["optimizer.lr = 0.0: must be in (0, inf)"]),
    ({"optimizer.lr": float("inf")}, ["optimizer.lr = inf: must be in (0, inf)"]),
    ({"optimizer.lr": float("nan")}, ["optimizer.lr = nan: must be in (0, inf)"]),
    ({"optimizer.beta1": 1.0}, ["optimizer.beta1 = 1.0: must be in [0, 1)"]),
    ({"optimizer.beta2": -0.1}, ["optimizer.beta2 = -0.1: must be in [0, 1); nearest legal: 0.0"]),
    ({"optimizer.min_lr_ratio": 1.5}, ["optimizer.min_lr_ratio = 1.5: must be in [0, 1]; nearest legal: 1.0"]),
    ({"optimizer.clip_norm": -1.0}, ["optimizer.clip_norm = -1.0: must be in [0, inf); nearest legal: 0.0"]),
    (
        {"data.validation_fraction": -0.1},
        ["data.validation_fraction = -0.1: must be in [0, 0.5]; nearest legal: 0.0"],
    ),
    (
        {"data.validation_fraction": 0.0, "run.validate_every": 5},
        ["run.validate_every = 5: needs data.validation_fraction above 0, and it is 0; nearest legal: 0"],
    ),
    (
        {"data.validation_fraction": 0.6},
        ["data.validation_fraction = 0.6: must be in [0, 0.5]; nearest legal: 0.5"],
    ),
    ({"run.out": ""}, ['run.out = "": must not be empty']),
    (
        {"data.corpus": ()},
        ['data.corpus = []: must name at least one corpus, none of them empty; nearest legal: ["stdlib"]'],
    ),
    ({"data.workers": -1}, [f"data.workers = -1: must be from 0 to {2**31 - 1}; nearest legal: 0"]),
    ({"run.prometheus_port": 2**16}, ["run.prometheus_port = 65536: must be from 1 to 65535; nearest legal: 65535"]),
    ({"run.prometheus_port": 0}, ["run.prometheus_port = 0: must be from 1 to 65535; nearest legal: 1"]),
    ({"data.weights": (0.0,)}, ["data.weights = [0.0]: each must be in (0, inf)"]),
    ({"data.weights": (float("nan"),)}, ["data.weights = [nan]: each must be in (0, inf)"]),
    ({"data.weights": (1.0, float("inf"))}, ["data.weights = [1.0, inf]: each must be in (0, inf)"]),
    ({"data.text_key": ""}, ['data.text_key = "": must not be empty']),
    (
        {"run.trackers": ("wandb", "mlflow", "wandb")},
        [
            "run.trackers = ['wandb', 'mlflow', 'wandb']: names a tracker more than once; "
            "nearest legal: ['wandb', 'mlflow']"
        ],
    ),
    ({"parallel.stage_layers": (5, -1)}, [f"parallel.stage_layers = [5, -1]: each must be from 0 to {2**31 - 1}"]),
    # two sins are both told
    ({"model.heads": 0, "run.steps": 0}, [f"model.heads = 0: {COUNT}", f"run.steps = 0: {COUNT}"]),
    # model
    ({"model.kv_heads": 8}, ["model.kv_heads = 8: must divide model.heads = 12; nearest legal: 6, 12"]),
    (
        {"parallel.regather": True, "parallel.sequence_parallel": False},
        [
            "parallel.regather = true: needs parallel.sequence_parallel: without it nothing is gathered; "
            "nearest legal: false"
        ],
    ),
    (
        {"parallel.loss_chunks": 7},
        ["parallel.loss_chunks = 7: must divide batch.sequence = 128; nearest legal: 4, 8"],
    ),
    (
        {"model.block": "gpt"},
        ['model.kv_heads = 4: block "gpt" has as many KV heads as heads; nearest legal: 12'],
    ),
    (
        {"model.head_dim": 15},
        ["model.head_dim = 15: must be even: rotary positions turn pairs of elements; nearest legal: 14, 16"],
    ),
    (
        {"model.head_dim": 1},
        ["model.head_dim = 1: must be even: rotary positions turn pairs of elements; nearest legal: 2"],
    ),
    (
        {"model.rope_scaling": replace(SCALING, low_freq_factor=4.0)},
        ["model.rope_scaling.low_freq_factor = 4.0: must be below model.rope_scaling.high_freq_factor = 4.0"],
    ),
    ({"batch.sequence": 512}, ["batch.sequence = 512: exceeds model.context = 256; nearest legal: 256"]),
    # tensor parallelism
    (
        {"parallel.tp": 8},
        ["parallel.tp = 8: must divide model.heads = 12; nearest legal: 4"],
    ),
    (
        {"parallel.tp": 3, "batch.sequence": 129},
        [
            "parallel.tp = 3: must divide model.ffn = 512; must divide model.kv_heads = 4 or be a multiple of it; "
            "nearest legal: 1"
        ],
    ),
    (
        {"parallel.tp": 6, "model.ffn": 480, "batch.sequence": 126},
        ["parallel.tp = 6: must divide model.kv_heads = 4 or be a multiple of it; nearest legal: 2"],
    ),
    (
        {"parallel.tp": 4, "batch.sequence": 126},
        [
            "parallel.tp = 4: must divide batch.sequence = 126 under parallel.sequence_parallel; nearest legal: 2",
        ],
    ),
    # pipeline
    (
        {"parallel.pp": 7},
        ["parallel.pp = 7: more stages than units: 4 layers, the embedding and the head fill 6; nearest legal: 6"],
    ),
    (
        {"parallel.stage_layers": (2, 1, 1)},
        ["parallel.stage_layers = [2, 1, 1]: names 3 stages, parallel.pp = 2; nearest legal: [] (as even as possible)"],
    ),
    (
        {"parallel.stage_layers": (2, 1)},
        ["parallel.stage_layers = [2, 1]: 2 + 1 = 3 layers, model.layers = 4; nearest legal: [] (as even as possible)"],
    ),
    (
        {"parallel.pp": 4, "parallel.stage_layers": (2, 0, 2, 0)},
        [
            "parallel.stage_layers = [2, 0, 2, 0]: stage 1 would hold nothing: only the first has the embedding and "
            "the last the head; nearest legal: [] (as even as possible)"
        ],
    ),
    (
        {"parallel.pp": 4, "parallel.stage_layers": (2, 2, 0, 0)},
        [
            "parallel.stage_layers = [2, 2, 0, 0]: stage 2 would hold nothing: only the first has the embedding and "
            "the last the head; nearest legal: [] (as even as possible)"
        ],
    ),
    (
        {"parallel.recompute": ("full", "selective", "none")},
        [
            "parallel.recompute = ['full', 'selective', 'none']: names 3 stages, parallel.pp = 2; nearest legal: "
            "['full', 'selective'], none"
        ],
    ),
    (
        {"parallel.pp": 3, "parallel.recompute": ("full",)},
        [
            "parallel.recompute = ['full']: names 1 stages, parallel.pp = 3; nearest legal: "
            "['full', 'full', 'full'], full"
        ],
    ),
    (
        {"parallel.recompute": ()},
        ["parallel.recompute = []: names 0 stages, parallel.pp = 2; nearest legal: ['none', 'none'], none"],
    ),
    ({"run.dropout": 1.0}, ["run.dropout = 1.0: must be in [0, 1)"]),
    ({"run.attention_dropout": -0.1}, ["run.attention_dropout = -0.1: must be in [0, 1); nearest legal: 0.0"]),
    # data and context parallelism, order
    (
        {"parallel.virtual_stages": 2},
        ["parallel.virtual_stages = 2: schedule 1f1b has one stage per rank; nearest legal: 1"],
    ),
    (
        {"parallel.schedule": "zbv"},
        ["parallel.virtual_stages = 1: each rank of schedule zbv has two stages; nearest legal: 2"],
    ),
    (
        {"parallel.schedule": "interleaved", "parallel.virtual_stages": 3},
        [
            "parallel.virtual_stages = 3: more stages than layers: 2 ranks of them are 6, model.layers = 4; "
            "nearest legal: 2"
        ],
    ),
    ({"parallel.ep": 2}, ["parallel.ep = 2: the model has no experts; nearest legal: 1"]),
    (
        {"parallel.ep": 3, "model.experts": Experts(count=8, top_k=2, ffn=64)},
        ["parallel.ep = 3: must divide dp · cp = 4 and model.experts.count = 8; nearest legal: 2, 4"],
    ),
    (
        {"model.experts": Experts(count=8, top_k=9, ffn=64)},
        ["model.experts.top_k = 9: exceeds model.experts.count = 8; nearest legal: 8"],
    ),
    (
        {"model.experts": Experts(count=8, top_k=2, ffn=64, dense_layers=5)},
        ["model.experts.dense_layers = 5: exceeds model.layers = 4; nearest legal: 4"],
    ),
    (
        {"model.experts": Experts(count=8, top_k=2, ffn=64), "model.block": "gpt", "model.kv_heads": 12},
        ["model.block = gpt: a mixture of experts goes with the other block; nearest legal: llama"],
    ),
    (
        {"parallel.pp": 1, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2},
        ["parallel.virtual_stages = 2: without a pipeline there is nothing to interleave; nearest legal: 1"],
    ),
    (
        {"model.latent": LatentAttention(kv_rank=64, nope_dim=8, rope_dim=4, v_dim=8)},
        ["model.head_dim = 16: latent attention has nope_dim + rope_dim = 12; nearest legal: 12"],
    ),
    (
        {"parallel.order": ("dp", "pp", "pp", "tp")},
        [
            "parallel.order = ['dp', 'pp', 'pp', 'tp']: must name each of dp, pp, cp, tp once, slowest first; "
            "nearest legal: ['dp', 'pp', 'cp', 'tp']"
        ],
    ),
    (
        {"parallel.dp_replicate": 3},
        ["parallel.dp_replicate = 3: dp = dp_replicate · dp_shard: must divide parallel.dp = 4; nearest legal: 2, 4"],
    ),
    (
        {"parallel.gather": "per_use", "parallel.zero": 2},
        [
            "parallel.gather = per_use: only parallel.zero = 3 lets go of weights between uses, and it is 2; "
            "nearest legal: auto, per_step"
        ],
    ),
    (
        {"parallel.reduce": "per_microbatch", "parallel.zero": 0},
        [
            "parallel.reduce = per_microbatch: parallel.zero = 0 keeps whole gradients: reducing them more than once "
            "per step saves nothing; nearest legal: auto, per_step"
        ],
    ),
    *(
        (
            {"run.compile": True, "parallel.schedule": name, "parallel.virtual_stages": virtual},
            [
                f"parallel.schedule = {name}: {splits} backwards, and a graph of run.compile has all of its gradients "
                f"at once; nearest legal: {whole}"
            ],
        )
        for name, virtual, splits, whole in (
            ("zb-h1", 1, "splits", "1f1b"),
            ("zbv", 2, "splits", "interleaved"),
            ("dualpipev", 2, "splits", "interleaved"),
            ("auto", 2, "may split", "interleaved"),
            ("auto", 1, "may split", "1f1b"),
        )
    ),
    # batch and steps
    (
        {"batch.global_batch": 30},
        [
            "batch.global_batch = 30: global_batch = dp · micro_batch · accumulation = 4 · 2 · accumulation "
            "must hold for a whole accumulation; nearest legal: 24, 32"
        ],
    ),
    (
        {"batch.global_batch": 7},
        [
            "batch.global_batch = 7: global_batch = dp · micro_batch · accumulation = 4 · 2 · accumulation "
            "must hold for a whole accumulation; nearest legal: 8"
        ],
    ),
    (
        {"data.corpus": ("stdlib", "notes"), "data.weights": (1.0,)},
        [
            "data.weights = [1.0]: one weight is needed for each of the 2 corpora of data.corpus; "
            "nearest legal: [] (all documents alike)"
        ],
    ),
    (
        {"optimizer.warmup_steps": 10},
        ["optimizer.warmup_steps = 10: must be below run.steps = 10; nearest legal: 9"],
    ),
    ({"run.trace_step": 11}, ["run.trace_step = 11: is after the last step, run.steps = 10; nearest legal: 10, 0"]),
    # faults
    (
        {"faults.on_nan": "rewind", "checkpoint.every": 0},
        ["faults.on_nan = rewind: there is no checkpoint to go back to: checkpoint.every is 0; nearest legal: skip"],
    ),
    (
        {"faults.on_spike": "rewind", "checkpoint.every": 5, "checkpoint.keep": 1},
        [
            "checkpoint.keep = 1: a spike may follow on the newest checkpoint, which then has what led to it: "
            "faults.on_spike needs two; nearest legal: 2"
        ],
    ),
]
