"""Wrong jobs and command lines, each with exactly what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.job_files import JOB, refusal, write

from trigrid.errors import Refused
from trigrid.job import load_job


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A job, what is put on top of it, and the messages of its refusal."""

    text: str = JOB
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    world: int | None = None
    says: list[str]


WRONG = {
    # types
    "a whole number with a fraction": Wrong(
        text=JOB.replace("tp = 2", "tp = 2.0"),
        says=["job.toml:18: parallel.tp = 2.0: a whole number is needed"],
    ),
    "a broken number": Wrong(
        arguments=("--tp=2.5",),
        says=["--tp: parallel.tp = 2.5: a whole number is needed"],
    ),
    "a string for a whole number": Wrong(
        text=JOB.replace("tp = 2", 'tp = "2"'),
        says=["job.toml:18: parallel.tp = 2: a whole number is needed"],
    ),
    "a word among those for the stages that is none": Wrong(
        arguments=("--recompute", "full,some"),
        says=[
            "--recompute: parallel.recompute = ['full', 'some']: no such choice: some; "
            "nearest legal: none, selective, full"
        ],
    ),
    "words for too many stages": Wrong(
        arguments=("--recompute", "full,none,none"),
        says=[
            "--recompute: parallel.recompute = ['full', 'none', 'none']: names 3 stages, parallel.pp = 1; "
            "nearest legal: ['full'], none"
        ],
    ),
    "a share of all": Wrong(
        arguments=("--run.dropout=1",),
        says=["--run.dropout: run.dropout = 1.0: must be in [0, 1)"],
    ),
    "true for a whole number": Wrong(
        arguments=("--tp=true",),
        says=["--tp: parallel.tp = true: a whole number is needed"],
    ),
    "a word for a whole number": Wrong(
        arguments=("--tp=two",),
        says=["--tp: parallel.tp = two: a whole number is needed"],
    ),
    "an array for a whole number": Wrong(
        arguments=("--tp=[2]",),
        says=["--tp: parallel.tp = [2]: a whole number is needed"],
    ),
    "a table for a whole number": Wrong(
        arguments=("--tp={a = 1}",),
        says=["--tp: parallel.tp = { }: a single value is needed"],
    ),
    "a date for a whole number": Wrong(
        arguments=("--tp=2026-01-01",),
        says=["--tp: parallel.tp = 2026-01-01: a single value is needed"],
    ),
    "a date for a string": Wrong(
        text=JOB.replace("steps = 10", "steps = 2026-01-01"),
        says=["job.toml:22: run.steps = 2026-01-01: a single value is needed"],
    ),
    "more than 64 bits": Wrong(
        arguments=("--tp=0xffffffffffffffffff",),
        says=["--tp: parallel.tp = 0xffffffffffffffffff: not a 64-bit number"],
    ),
    "one more than 64 bits": Wrong(
        arguments=("--seed=9223372036854775808",),
        says=["--seed: run.seed = 0x8000000000000000: not a 64-bit number"],
    ),
    "true for a choice of numbers": Wrong(
        arguments=("--zero=true",),
        says=["--zero: parallel.zero = true: no such choice; nearest legal: 0, 1, 2, 3"],
    ),
    "a fraction for a choice of numbers": Wrong(
        arguments=("--zero=1.0",),
        says=["--zero: parallel.zero = 1.0: no such choice; nearest legal: 0, 1, 2, 3"],
    ),
    "a string for a choice of numbers": Wrong(
        arguments=('--zero="1"',),
        says=['--zero: parallel.zero = 1: no such choice: "1", a string; nearest legal: 0, 1, 2, 3'],
    ),
    "a ZeRO stage that does not exist": Wrong(
        text=JOB.replace("zero = 2", "zero = 4"),
        says=["job.toml:19: parallel.zero = 4: no such choice; nearest legal: 0, 1, 2, 3"],
    ),
    "a device that does not exist": Wrong(
        arguments=("--device=gpu",),
        says=["--device: run.device = gpu: no such choice; nearest legal: auto, cpu, cuda"],
    ),
    "true for a number": Wrong(
        arguments=("--lr=true",),
        says=["--lr: optimizer.lr = true: a number is needed"],
    ),
    "a string for a number": Wrong(
        arguments=('--lr="1"',),
        says=["--lr: optimizer.lr = 1: a number is needed"],
    ),
    "a number for a truth": Wrong(
        arguments=("--model.tied=1",),
        says=["--model.tied: model.tied = 1: true or false is needed"],
    ),
    "Python's word for true": Wrong(
        arguments=("--model.tied=True",),
        says=["--model.tied: model.tied = True: true or false is needed"],
    ),
    "a number for a string": Wrong(
        text=JOB.replace("steps = 10", "steps = 10\nout = 17"),
        says=["job.toml:23: run.out = 17: a string is needed"],
    ),
    "a string for an array": Wrong(
        arguments=("--data.corpus=stdlib",),
        says=["--data.corpus: data.corpus = stdlib: an array is needed"],
    ),
    "numbers for strings": Wrong(
        arguments=("--data.corpus=[1]",),
        says=["--data.corpus: data.corpus = [1]: a string is needed"],
    ),
    "arrays in an array": Wrong(
        arguments=("--data.corpus=[[1]]",),
        says=["--data.corpus: data.corpus = ['[ ]']: an array of single values is needed"],
    ),
    "an axis that does not exist": Wrong(
        arguments=('--parallel.order=["dp", "ep"]',),
        says=["--parallel.order: parallel.order = ['dp', 'ep']: no such choice: ep; nearest legal: dp, pp, cp, tp"],
    ),
    "a tracker that does not exist": Wrong(
        arguments=('--run.trackers=["wandb", "comet"]',),
        says=[
            "--run.trackers: run.trackers = ['wandb', 'comet']: no such choice: comet; nearest legal: "
            "tensorboard, wandb, mlflow, prometheus"
        ],
    ),
    "a tracker outside of an array": Wrong(
        arguments=("--run.trackers=wandb",),
        says=["--run.trackers: run.trackers = wandb: an array is needed"],
    ),
    "a number for a table": Wrong(
        arguments=("--batch=3",),
        says=["--batch: batch = 3: a table is needed"],
    ),
    "a table without what it needs": Wrong(
        arguments=("--model.rope_scaling={}",),
        says=["--model.rope_scaling: model.rope_scaling.factor = (not given): needed"],
    ),
    "text that is none": Wrong(
        arguments=("--run.out=\udcff",),
        says=["--run.out: run.out = \udcff: not valid text"],
    ),
    "a string for accumulation": Wrong(
        arguments=('--accumulation="2"',),
        says=["--accumulation: batch.accumulation = 2: a whole number is needed"],
    ),
    # ranges
    "no steps": Wrong(
        text=JOB.replace("steps = 10", "steps = 0"),
        says=["job.toml:22: run.steps = 0: must be from 1 to 2147483647; nearest legal: 1"],
    ),
    "a negative seed": Wrong(
        arguments=("--seed=-1",),
        says=["--seed: run.seed = -1: must be from 0 to 9223372036854775807; nearest legal: 0"],
    ),
    "a learning rate of zero": Wrong(
        arguments=("--lr=0",),
        says=["--lr: optimizer.lr = 0.0: must be in (0, inf)"],
    ),
    "a learning rate that is no number": Wrong(
        arguments=("--lr=nan",),
        says=["--lr: optimizer.lr = nan: must be in (0, inf)"],
    ),
    "an infinite learning rate": Wrong(
        arguments=("--lr=inf",),
        says=["--lr: optimizer.lr = inf: must be in (0, inf)"],
    ),
    "half of the data and more held out": Wrong(
        arguments=("--data.validation_fraction=0.6",),
        says=["--data.validation_fraction: data.validation_fraction = 0.6: must be in [0, 0.5]; nearest legal: 0.5"],
    ),
    "a negative number of workers": Wrong(
        arguments=("--data.workers=-1",),
        says=["--data.workers: data.workers = -1: must be from 0 to 2147483647; nearest legal: 0"],
    ),
    "a port that no machine has": Wrong(
        arguments=("--run.prometheus_port=65536",),
        says=["--run.prometheus_port: run.prometheus_port = 65536: must be from 1 to 65535; nearest legal: 65535"],
    ),
    "a port of zero": Wrong(
        arguments=("--run.prometheus_port=0",),
        says=["--run.prometheus_port: run.prometheus_port = 0: must be from 1 to 65535; nearest legal: 1"],
    ),
    "a weight of zero": Wrong(
        arguments=("--data.weights=[0]",),
        says=["--data.weights: data.weights = [0.0]: each must be in (0, inf)"],
    ),
    "an infinite weight": Wrong(
        arguments=("--data.weights=[inf]",),
        says=["--data.weights: data.weights = [inf]: each must be in (0, inf)"],
    ),
    "no corpus": Wrong(
        arguments=("--data.corpus=[]",),
        says=[
            "--data.corpus: data.corpus = []: must name at least one corpus, none of them empty; nearest "
            'legal: ["stdlib"]'
        ],
    ),
    "an empty string": Wrong(
        arguments=("--data.tokenizer=",),
        says=['--data.tokenizer: data.tokenizer = "": must not be empty'],
    ),
    "no accumulation": Wrong(
        arguments=("--accumulation=0",),
        says=["--accumulation: batch.accumulation = 0: must be from 1 to 2147483647; nearest legal: 1"],
    ),
    "no vocabulary": Wrong(
        text=JOB.replace("vocab = 512", "vocab = 0"),
        says=["job.toml:9: model.vocab = 0: must be from 1 to 2147483647; nearest legal: 1"],
    ),
    "degrees of zero under a launcher": Wrong(
        arguments=("--tp=0",),
        world=8,
        says=["--tp: parallel.tp = 0: must be from 1 to 2147483647; nearest legal: 1"],
    ),
    # keys that do not exist
    "ours, misspelt": Wrong(
        text=JOB.replace("zero = 2", "zero = 2\nschedul = 'gpipe'"),
        says=["job.toml:20: parallel.schedul = gpipe: there is no such key; nearest legal: parallel.schedule"],
    ),
    "a section of ours, misspelt": Wrong(
        text=JOB + "[clustr]\ngpus_per_node = 8\n",
        says=["job.toml:23: clustr = { }: there is no such key; nearest legal: cluster"],
    ),
    "ours, misspelt in the environment": Wrong(
        env={"TRIGRID_BATCH__GLOBAL_BATH": "3"},
        says=[
            "TRIGRID_BATCH__GLOBAL_BATH: batch.global_bath = 3: there is no such key; nearest legal: batch.global_batch"
        ],
    ),
    "ours without its section": Wrong(
        arguments=("--sequence=64",),
        says=["--sequence: sequence = 64: there is no such key; nearest legal: batch.sequence"],
    ),
    "like nothing": Wrong(
        arguments=("--fish=64",),
        says=["--fish: fish = 64: there is no such key"],
    ),
    "a flag of nothing without a value": Wrong(
        arguments=("--fish",),
        says=["--fish: fish = (not given): there is no such key"],
    ),
    "torchtitan's batch": Wrong(
        text=JOB + "[training]\nlocal_batch_size = 4\nseq_len = 32\nsteps = 10\n",
        says=[
            "job.toml:24: training.local_batch_size = 4: there is no such key; torchtitan's name for batch.micro_batch",
            "job.toml:25: training.seq_len = 32: there is no such key; torchtitan's name for batch.sequence",
            "job.toml:26: training.steps = 10: there is no such key; torchtitan's name for run.steps",
        ],
    ),
    "torchtitan's degrees": Wrong(
        arguments=("--parallelism.data_parallel_shard_degree=8", "--parallelism.tensor_parallel_degree=2"),
        says=[
            "--parallelism.data_parallel_shard_degree: parallelism.data_parallel_shard_degree = 8: there is no "
            "such key; torchtitan's name for parallel.dp: dp = dp_replicate · dp_shard, with zero = 3",
            "--parallelism.tensor_parallel_degree: parallelism.tensor_parallel_degree = 2: there is no such "
            "key; torchtitan's name for parallel.tp",
        ],
    ),
    "torchtitan's recomputation in the environment": Wrong(
        env={"TRIGRID_ACTIVATION_CHECKPOINT__MODE": "full"},
        says=[
            "TRIGRID_ACTIVATION_CHECKPOINT__MODE: activation_checkpoint.mode = full: there is no such key; "
            'torchtitan\'s name for parallel.recompute: "none", "selective" or "full"'
        ],
    ),
    "torchtitan's name in a section of ours": Wrong(
        text=JOB.replace("tp = 2", "tensor_parallel_degree = 2"),
        says=[
            "job.toml:18: parallel.tensor_parallel_degree = 2: there is no such key; torchtitan's name for parallel.tp"
        ],
    ),
    "Megatron-LM's degrees": Wrong(
        arguments=("--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "2"),
        says=[
            "--tensor-model-parallel-size: tensor_model_parallel_size = 8: there is no such key; Megatron-LM's "
            "name for parallel.tp",
            "--pipeline-model-parallel-size: pipeline_model_parallel_size = 2: there is no such key; "
            "Megatron-LM's name for parallel.pp",
        ],
    ),
    "Megatron-LM's lowest rate": Wrong(
        arguments=("--min-lr", "1e-5"),
        says=[
            "--min-lr: min_lr = 1e-05: there is no such key; Megatron-LM's name for optimizer.min_lr_ratio: a "
            "share of optimizer.lr, not a rate"
        ],
    ),
    "Megatron-LM's samples": Wrong(
        arguments=("--train-samples=1000",),
        says=[
            "--train-samples: train_samples = 1000: there is no such key; Megatron-LM's name for run.steps: "
            "train_samples ÷ batch.global_batch"
        ],
    ),
    "Megatron-LM's flags without values": Wrong(
        arguments=("--bf16", "--use-distributed-optimizer"),
        says=[
            '--bf16: bf16 = (not given): there is no such key; Megatron-LM\'s name for run.precision: "bf16"',
            "--use-distributed-optimizer: use_distributed_optimizer = (not given): there is no such key; "
            "Megatron-LM's name for parallel.zero: 1",
        ],
    ),
    "Megatron-LM's names in a section of ours": Wrong(
        text=JOB.replace("layers = 4", "layers = 4\nnum-layers = 4"),
        says=["job.toml:5: model.num-layers = 4: there is no such key; Megatron-LM's name for model.layers"],
    ),
    "DeepSpeed's batch": Wrong(
        text="train_micro_batch_size_per_gpu = 1\ngradient_accumulation_steps = 2\n" + JOB,
        says=[
            "job.toml:1: train_micro_batch_size_per_gpu = 1: there is no such key; DeepSpeed's name for "
            "batch.micro_batch",
            "job.toml:2: gradient_accumulation_steps = 2: there is no such key; DeepSpeed's name for "
            "batch.accumulation",
        ],
    ),
    "DeepSpeed's ZeRO": Wrong(
        text=JOB + "[zero_optimization]\nstage = 3\noverlap_comm = true\n",
        says=[
            "job.toml:24: zero_optimization.stage = 3: there is no such key; DeepSpeed's name for parallel.zero",
            "job.toml:25: zero_optimization.overlap_comm = true: there is no such key",
        ],
    ),
    "DeepSpeed's optimizer": Wrong(
        text=JOB + "[optimizer.params]\nlr = 1e-4\nbetas = [0.9, 0.95]\n",
        says=[
            "job.toml:24: optimizer.params.lr = 0.0001: there is no such key; DeepSpeed's name for optimizer.lr",
            "job.toml:25: optimizer.params.betas = [0.9, 0.95]: there is no such key; DeepSpeed's name for "
            "optimizer.beta1: the first of them; the second is optimizer.beta2",
        ],
    ),
    "a word that is not enough without its section": Wrong(
        arguments=("--stage=3",),
        says=["--stage: stage = 3: there is no such key"],
    ),
    # flags
    "a flag without a value": Wrong(
        arguments=("--tp",),
        says=["--tp: parallel.tp = (not given): the flag needs a value"],
    ),
    "a flag before a flag": Wrong(
        arguments=("--run.out", "--tp=2"),
        says=["--run.out: run.out = (not given): the flag needs a value"],
    ),
    "no flag at all": Wrong(
        arguments=("tp=2",),
        says=["command line: argument = tp=2: --key value or --key=value is expected"],
    ),
    # what is missing
    "a batch and steps": Wrong(
        text=JOB.replace("global_batch = 48\n", "").replace("sequence = 32\n", "").replace("steps = 10", "seed = 1.5"),
        arguments=("--dp=2",),
        says=[
            "job.toml:12: batch.global_batch = (not given): needed, or batch.accumulation: global_batch = dp · "
            "micro_batch · accumulation",
            "job.toml:12: batch.sequence = (not given): needed",
            "job.toml:19: run.steps = (not given): needed",
            "job.toml:20: run.seed = 1.5: a whole number is needed",
        ],
    ),
    "a model": Wrong(
        text="[batch]" + JOB.partition("[batch]")[2],
        says=[
            "job.toml: model.name = (not given): a name of the catalogue or model.config is needed; a model of "
            "your own also needs name, hidden, layers, heads, kv_heads, head_dim, ffn, vocab, context"
        ],
    ),
    "steps, refused for its type alone": Wrong(
        text=JOB.replace("steps = 10", "steps = '10'"),
        says=["job.toml:22: run.steps = 10: a whole number is needed"],
    ),
    # the batch
    "neither global batch nor accumulation": Wrong(
        text=JOB.replace("global_batch = 48\n", ""),
        says=[
            "job.toml:12: batch.global_batch = (not given): needed, or batch.accumulation: global_batch = dp · "
            "micro_batch · accumulation"
        ],
    ),
    "a global batch that does not divide": Wrong(
        arguments=("--dp=5",),
        says=[
            "job.toml:13: batch.global_batch = 48: global_batch = dp · micro_batch · accumulation = 5 · 1 · "
            "accumulation must hold for a whole accumulation; nearest legal: 45, 50"
        ],
    ),
    "a global batch smaller than a pass": Wrong(
        arguments=("--dp=4", "--micro-batch=16"),
        says=[
            "job.toml:13: batch.global_batch = 48: global_batch = dp · micro_batch · accumulation = 4 · 16 · "
            "accumulation must hold for a whole accumulation; nearest legal: 64"
        ],
    ),
    "a launcher whose ranks do not divide the batch": Wrong(
        world=10,
        says=[
            "job.toml:13: batch.global_batch = 48: global_batch = dp · micro_batch · accumulation = 5 · 1 · "
            "accumulation must hold for a whole accumulation; nearest legal: 45, 50"
        ],
    ),
    "four numbers that do not fit": Wrong(
        arguments=("--dp=4", "--accumulation=5"),
        says=[
            "--accumulation: batch.accumulation = 5: global_batch = dp · micro_batch · accumulation = 4 · 1 · "
            "5 = 20, but batch.global_batch = 48; nearest legal: 12"
        ],
    ),
    "four numbers that no accumulation makes fit": Wrong(
        arguments=("--dp=5", "--accumulation=4"),
        says=[
            "job.toml:13: batch.global_batch = 48: global_batch = dp · micro_batch · accumulation = 5 · 1 · 4 "
            "= 20 must hold; nearest legal: 20"
        ],
    ),
    "an accumulation that does not fit the launcher": Wrong(
        arguments=("--accumulation=5",),
        world=8,
        says=[
            "--accumulation: batch.accumulation = 5: global_batch = dp · micro_batch · accumulation = 4 · 1 · "
            "5 = 20, but batch.global_batch = 48; nearest legal: 12"
        ],
    ),
    "no micro-batch for this accumulation": Wrong(
        text=JOB.replace("micro_batch = 1\n", ""),
        arguments=("--dp=4", "--accumulation=7"),
        says=[
            "job.toml:13: batch.global_batch = 48: global_batch = dp · micro_batch · accumulation = 4 · "
            "micro_batch · 7 must hold for a whole micro_batch; nearest legal: 28, 56"
        ],
    ),
    "no dp for this accumulation": Wrong(
        arguments=("--accumulation=7",),
        says=[
            "job.toml:13: batch.global_batch = 48: global_batch = dp · micro_batch · accumulation = dp · 1 · 7 "
            "must hold for a whole dp; nearest legal: 42, 49"
        ],
    ),
    "a micro-batch of zero beside an accumulation": Wrong(
        arguments=("--micro-batch=0", "--accumulation=7"),
        says=["--micro-batch: batch.micro_batch = 0: must be from 1 to 2147483647; nearest legal: 1"],
    ),
    # the model and its parallel degrees
    "KV heads that do not divide the heads": Wrong(
        text=JOB.replace("kv_heads = 4", "kv_heads = 3"),
        says=[
            "job.toml:6: model.kv_heads = 3: must divide model.heads = 8; nearest legal: 2, 4",
            "job.toml:18: parallel.tp = 2: must divide model.kv_heads = 3 or be a multiple of it; nearest legal: 1",
        ],
    ),
    "tp that divides nothing": Wrong(
        text=JOB.replace("tp = 2", "tp = 3"),
        says=[
            "job.toml:18: parallel.tp = 3: must divide model.heads = 8; must divide model.ffn = 128; must "
            "divide model.kv_heads = 4 or be a multiple of it; must divide batch.sequence = 32 under "
            "parallel.sequence_parallel; nearest legal: 2, 4"
        ],
    ),
    "tp that does not divide the sequence": Wrong(
        text=JOB.replace("sequence = 32", "sequence = 31"),
        says=[
            "job.toml:18: parallel.tp = 2: must divide batch.sequence = 31 under parallel.sequence_parallel; "
            "nearest legal: 1"
        ],
    ),
    "a sequence longer than the context": Wrong(
        text=JOB.replace("sequence = 32", "sequence = 128"),
        says=["job.toml:14: batch.sequence = 128: exceeds model.context = 64; nearest legal: 64"],
    ),
    "an odd head": Wrong(
        text=JOB.replace("head_dim = 8", "head_dim = 7"),
        says=[
            "job.toml:7: model.head_dim = 7: must be even: rotary positions turn pairs of elements; nearest legal: 6, 8"
        ],
    ),
    "more stages than units": Wrong(
        arguments=("--pp=7",),
        says=[
            "--pp: parallel.pp = 7: more stages than units: 4 layers, the embedding and the head fill 6; "
            "nearest legal: 6"
        ],
    ),
    "layers that do not add up": Wrong(
        arguments=("--pp=2", "--parallel.stage_layers=[3, 2]"),
        says=[
            "--parallel.stage_layers: parallel.stage_layers = [3, 2]: 3 + 2 = 5 layers, model.layers = 4; "
            "nearest legal: [] (as even as possible)"
        ],
    ),
    "experts of a model without any": Wrong(
        arguments=("--parallel.ep=2",),
        says=["--parallel.ep: parallel.ep = 2: the model has no experts; nearest legal: 1"],
    ),
    "copies that do not divide dp": Wrong(
        arguments=("--dp=4", "--parallel.dp_replicate=3"),
        says=[
            "--parallel.dp_replicate: parallel.dp_replicate = 3: dp = dp_replicate · dp_shard: must divide "
            "parallel.dp = 4; nearest legal: 2, 4"
        ],
    ),
    "weights gathered per use in ZeRO-2": Wrong(
        arguments=("--parallel.gather=per_use",),
        says=[
            "--parallel.gather: parallel.gather = per_use: only parallel.zero = 3 lets go of weights between "
            "uses, and it is 2; nearest legal: auto, per_step"
        ],
    ),
    "gradients reduced per microbatch in ZeRO-0": Wrong(
        arguments=("--zero=0", "--parallel.reduce=per_microbatch"),
        says=[
            "--parallel.reduce: parallel.reduce = per_microbatch: parallel.zero = 0 keeps whole gradients: "
            "reducing them more than once per step saves nothing; nearest legal: auto, per_step"
        ],
    ),
    "a world that dp does not fill": Wrong(
        arguments=("--pp=2",),
        world=6,
        says=["world = 6: world = tp · pp · cp · dp = 2 · 2 · 1 · dp must hold for a whole dp; nearest legal: 4, 8"],
    ),
    "a dp that the world does not hold": Wrong(
        arguments=("--dp=3",),
        world=8,
        says=[
            "--dp: parallel.dp = 3: world = tp · pp · cp · dp = 2 · 1 · 1 · 3 = 6, but there are 8 ranks; "
            "nearest legal: 4"
        ],
    ),
    "a world of nobody": Wrong(
        world=0,
        says=["world = 0: world = tp · pp · cp · dp = 2 · 1 · 1 · dp must hold for a whole dp; nearest legal: 2"],
    ),
    # the data and the run
    "fewer weights than corpora": Wrong(
        arguments=('--data.corpus=["stdlib", "notes"]', "--data.weights=[1]"),
        says=[
            "--data.weights: data.weights = [1.0]: one weight is needed for each of the 2 corpora of "
            "data.corpus; nearest legal: [] (all documents alike)"
        ],
    ),
    "a tracker twice": Wrong(
        arguments=('--run.trackers=["wandb", "wandb"]',),
        says=[
            "--run.trackers: run.trackers = ['wandb', 'wandb']: names a tracker more than once; nearest legal: "
            "['wandb']"
        ],
    ),
    "validation without held-out text": Wrong(
        arguments=("--data.validation_fraction=0", "--run.validate_every=5"),
        says=[
            "--run.validate_every: run.validate_every = 5: needs data.validation_fraction above 0, and it is "
            "0; nearest legal: 0"
        ],
    ),
    "warm-up as long as the run": Wrong(
        arguments=("--optimizer.warmup_steps=10",),
        says=["--optimizer.warmup_steps: optimizer.warmup_steps = 10: must be below run.steps = 10; nearest legal: 9"],
    ),
    # files
    "an empty file": Wrong(
        text="# nothing\n",
        says=["job = job.toml: the file is empty; a job needs at least [model], [batch] and [run]"],
    ),
    "no TOML": Wrong(
        text="[run]\nsteps = = 2\n",
        says=["job.toml:2: job = job.toml: not TOML: Invalid value (at line 2, column 9)"],
    ),
    "an array without an end": Wrong(
        text="[run]\nsteps = [\n",
        says=["job.toml:3: job = job.toml: not TOML: Invalid value (at end of document)"],
    ),
    "a key twice": Wrong(
        text=JOB.replace("tp = 2", "tp = 2\ntp = 4"),
        says=["job.toml:19: job = job.toml: not TOML: Cannot overwrite a value (at line 19, column 7)"],
    ),
    "a section twice": Wrong(
        text=JOB + "[run]\nsteps = 10\n",
        says=["job.toml:23: job = job.toml: not TOML: Cannot declare ('run',) twice (at line 23, column 5)"],
    ),
    "a digit too many": Wrong(
        text=f"a = {'9' * 9999}",
        says=[
            "job = job.toml: not TOML: Exceeds the limit (4300 digits) for integer string conversion: value "
            "has 9999 digits; use sys.set_int_max_str_digits() to increase the limit"
        ],
    ),
    # several at once
    "each with its place": Wrong(
        text=JOB.replace("tp = 2", "tp = 3\nschedul = 'gpipe'") + "[clustr]\ngpus_per_node = 8\n",
        arguments=("--sequence=64",),
        env={"TRIGRID_BATCH__GLOBAL_BATH": "3"},
        says=[
            "job.toml:19: parallel.schedul = gpipe: there is no such key; nearest legal: parallel.schedule",
            "job.toml:24: clustr = { }: there is no such key; nearest legal: cluster",
            "TRIGRID_BATCH__GLOBAL_BATH: batch.global_bath = 3: there is no such key; nearest legal: "
            "batch.global_batch",
            "--sequence: sequence = 64: there is no such key; nearest legal: batch.sequence",
            "job.toml:18: parallel.tp = 3: must divide model.heads = 8; must divide model.ffn = 128; must "
            "divide model.kv_heads = 4 or be a multiple of it; must divide batch.sequence = 32 under "
            "parallel.sequence_parallel; nearest legal: 2, 4",
        ],
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_says(tmp_path: Path, wrong: Wrong) -> None:
    assert refusal(tmp_path, wrong.text, *wrong.arguments, world=wrong.world, env=wrong.env) == wrong.says


def test_paths_that_hold_no_job(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(Refused) as refused:
            load_job(path, env={})
        return str(refused.value).replace(f"{tmp_path}/", "").replace(str(tmp_path), "FOLDER")

    write(tmp_path, JOB)
    assert said(tmp_path / "jb.toml") == "job = jb.toml: there is no such file; nearest legal: job.toml"
    assert said(tmp_path / "none" / "job.toml") == "job = none/job.toml: there is no such file"
    assert said(tmp_path) == "job = FOLDER: is a folder, not a file; nearest legal: job.toml"
    (tmp_path / "latin.toml").write_bytes(b"a = '\xff'")
    reason = "not TOML: 'utf-8' codec can't decode byte 0xff in position 5: invalid start byte"
    assert said(tmp_path / "latin.toml") == f"job = latin.toml: {reason}"
