"""What torchtitan, Megatron-LM and DeepSpeed call the keys of a job.

Names are written with underscores; those of torchtitan and DeepSpeed with their section. A name stands for the key
after it, in another sense where a colon follows.
"""

from __future__ import annotations

SPELLINGS = {
    "torchtitan": {
        "model.flavor": "model.name",
        "model.hf_assets_path": "data.tokenizer",
        "model.tokenizer_path": "data.tokenizer",
        "training.batch_size": "batch.micro_batch",
        "training.local_batch_size": "batch.micro_batch",
        "training.global_batch_size": "batch.global_batch",
        "training.seq_len": "batch.sequence",
        "training.steps": "run.steps",
        "training.seed": "run.seed",
        "debug.seed": "run.seed",
        "training.max_norm": "optimizer.clip_norm",
        "training.dataset": 'data.corpus: an array, with "hf:NAME" for a Hugging Face dataset',
        "training.dataset_path": "data.corpus: an array of paths",
        "training.mixed_precision_param": 'run.precision: "bf16" or "fp32"',
        "training.dtype": 'run.precision: "bf16" or "fp32"',
        "lr_scheduler.warmup_steps": "optimizer.warmup_steps",
        "lr_scheduler.lr_min": "optimizer.min_lr_ratio",
        "lr_scheduler.min_lr_factor": "optimizer.min_lr_ratio",
        "parallelism.data_parallel_degree": "parallel.dp",
        "parallelism.data_parallel_shard_degree": "parallel.dp: dp = dp_replicate · dp_shard, with zero = 3",
        "parallelism.data_parallel_replicate_degree": "parallel.dp_replicate: parallel.dp counts all copies",
        "parallelism.fsdp_reshard_after_forward": 'parallel.gather: "per_use" reshards, with zero = 3',
        "parallelism.tensor_parallel_degree": "parallel.tp",
        "parallelism.pipeline_parallel_degree": "parallel.pp",
        "parallelism.context_parallel_degree": "parallel.cp",
        "parallelism.pipeline_parallel_schedule": 'parallel.schedule: "1f1b" or "gpipe"',
        "parallelism.pipeline_parallel_microbatch_size": "batch.micro_batch",
        "parallelism.pipeline_parallel_layers_per_stage": "parallel.stage_layers: an array, one number for each stage",
        "parallelism.module_fqns_per_model_part": "parallel.stage_layers: an array, one number for each stage",
        "compile.enable": "run.compile",
        "training.compile": "run.compile",
        "activation_checkpoint.mode": 'parallel.recompute: "none", "selective" or "full"',
        "job.dump_folder": "run.out",
        "metrics.log_freq": "run.log_every",
        "metrics.enable_tensorboard": "run.trackers: an array of names",
        "metrics.enable_wandb": "run.trackers: an array of names",
        "validation.freq": "run.validate_every",
        "validation.enable": "run.validate_every: in steps",
        "validation.steps": "run.validation_batches",
        "validation.dataset": "data.validation_fraction: a share of the corpus",
        "validation.dataset_path": "data.validation_fraction: a share of the corpus",
    },
    "Megatron-LM": {
        "num_layers": "model.layers",
        "hidden_size": "model.hidden",
        "ffn_hidden_size": "model.ffn",
        "num_attention_heads": "model.heads",
        "num_query_groups": "model.kv_heads",
        "group_query_attention": "model.kv_heads: fewer than model.heads",
        "kv_channels": "model.head_dim",
        "max_position_embeddings": "model.context",
        "vocab_size": "model.vocab",
        "norm_epsilon": "model.norm_eps",
        "rotary_base": "model.rope_theta",
        "rope_scaling_factor": "model.rope_scaling.factor",
        "use_rope_scaling": "model.rope_scaling: a table of numbers",
        "untie_embeddings_and_output_weights": "model.tied: true where they are one weight, and false by default",
        "add_qkv_bias": "model.qkv_bias",
        "qk_layernorm": "model.qk_norm",
        "micro_batch_size": "batch.micro_batch",
        "global_batch_size": "batch.global_batch",
        "seq_length": "batch.sequence",
        "train_iters": "run.steps",
        "train_samples": "run.steps: train_samples ÷ batch.global_batch",
        "min_lr": "optimizer.min_lr_ratio: a share of optimizer.lr, not a rate",
        "lr_warmup_iters": "optimizer.warmup_steps",
        "lr_warmup_samples": "optimizer.warmup_steps: lr_warmup_samples ÷ batch.global_batch",
        "lr_warmup_fraction": "optimizer.warmup_steps: lr_warmup_fraction · run.steps",
        "lr_decay_iters": "run.steps: the learning rate falls until the last of them",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "adam_eps": "optimizer.eps",
        "clip_grad": "optimizer.clip_norm",
        "bf16": 'run.precision: "bf16"',
        "tensor_model_parallel_size": "parallel.tp",
        "pipeline_model_parallel_size": "parallel.pp",
        "context_parallel_size": "parallel.cp",
        "num_distributed_optimizer_instances": "parallel.dp_replicate",
        "use_distributed_optimizer": "parallel.zero: 1",
        "data_parallel_sharding_strategy": "parallel.zero: 0 to 3",
        "use_megatron_fsdp": "parallel.zero: 3",
        "use_torch_fsdp2": "parallel.zero: 3",
        "decoder_first_pipeline_num_layers": "parallel.stage_layers: an array, one number for each stage",
        "decoder_last_pipeline_num_layers": "parallel.stage_layers: an array, one number for each stage",
        "pipeline_model_parallel_layout": "parallel.stage_layers: an array, one number for each stage",
        "recompute_granularity": 'parallel.recompute: "none", "selective" or "full"',
        "recompute_method": 'parallel.recompute: "full" does so block by block',
        "recompute_activations": 'parallel.recompute: "selective"',
        "hidden_dropout": "run.dropout",
        "attention_dropout": "run.attention_dropout",
        "data_path": "data.corpus: an array, with the weights in data.weights",
        "train_data_path": "data.corpus: an array, with the weights in data.weights",
        "split": "data.validation_fraction: one share, the rest is for training",
        "tokenizer_model": "data.tokenizer",
        "tokenizer_type": "data.tokenizer: the file decides the kind",
        "vocab_file": "data.tokenizer",
        "data_cache_path": "data.cache",
        "num_workers": "data.workers",
        "reset_attention_mask": "data.document_attention",
        "log_interval": "run.log_every",
        "eval_interval": "run.validate_every",
        "eval_iters": "run.validation_batches",
        "tensorboard_dir": "run.trackers: an array of names; files go to the folder of the run",
        "wandb_project": "run.trackers: an array of names",
        "save": "run.out",
    },
    "DeepSpeed": {
        "train_batch_size": "batch.global_batch",
        "train_micro_batch_size_per_gpu": "batch.micro_batch",
        "gradient_accumulation_steps": "batch.accumulation",
        "gradient_clipping": "optimizer.clip_norm",
        "zero_optimization.stage": "parallel.zero",
        "zero_optimization.mics_shard_size": "parallel.dp_replicate: dp_replicate = dp ÷ mics_shard_size",
        "tensor_parallel.autotp_size": "parallel.tp",
        "sequence_parallel_size": "parallel.cp",
        "optimizer.params.lr": "optimizer.lr",
        "optimizer.params.betas": "optimizer.beta1: the first of them; the second is optimizer.beta2",
        "optimizer.params.eps": "optimizer.eps",
        "optimizer.params.weight_decay": "optimizer.weight_decay",
        "scheduler.params.warmup_num_steps": "optimizer.warmup_steps",
        "scheduler.params.total_num_steps": "run.steps",
        "scheduler.params.cos_min_ratio": "optimizer.min_lr_ratio",
        "bf16.enabled": 'run.precision: "bf16"',
        "steps_per_print": "run.log_every",
        "tensorboard.enabled": "run.trackers: an array of names",
        "wandb.enabled": "run.trackers: an array of names",
    },
}


def meaning_elsewhere(key: tuple[str, ...]) -> str | None:
    """Whose name for which key of ours the unknown `key` is, as part of a sentence; None where it is nobody's.

    The whole of `key` is sought first, then its last part among the last parts of names; but not a single word, such
    as `mode`: that says too little without its section.
    """
    whole = ".".join(key).replace("-", "_")
    last = whole.rpartition(".")[2]
    found = {tool: names[whole] for tool, names in SPELLINGS.items() if whole in names}
    if not found and "_" in last:
        ends = [(tool, name, ours) for tool, names in SPELLINGS.items() for name, ours in names.items()]
        found = {tool: ours for tool, name, ours in ends if name.rpartition(".")[2] == last}
    if len({ours.partition(":")[0] for ours in found.values()}) != 1:
        return None
    owners = " and ".join(f"{tool}'s" for tool in found)
    return f"{owners} name for {next(iter(found.values()))}"


def is_section_elsewhere(key: tuple[str, ...]) -> bool:
    """Whether names of another tool begin with `key`."""
    prefix = ".".join(key).replace("-", "_") + "."
    return any(name.startswith(prefix) for names in SPELLINGS.values() for name in names)
