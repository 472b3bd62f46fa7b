"""A job as the arguments or the configuration of another trainer, in its own key names."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Literal

import tomli_w

from trigrid.blueprint import split_layers
from trigrid.errors import Problem, Refused
from trigrid.spec.job import Job
from trigrid.spec.layout import V_SHAPED, Layout, RecomputeName, zero_policy

Target = Literal["megatron", "torchtitan", "deepspeed"]
TITAN_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
MEGATRON_SCHEDULES = ("1f1b", "interleaved")


@dataclass(frozen=True)
class Export:
    """text: what the other trainer reads; notes: what it does otherwise, or takes from elsewhere."""

    text: str
    notes: tuple[str, ...]


def export_job(job: Job, target: Target) -> Export:
    """`job` for `target`. Raises Refused where the other trainer has no such layout."""
    return {"megatron": _megatron, "torchtitan": _torchtitan, "deepspeed": _deepspeed}[target](job)


def _refused(key: str, value: object, reason: str, legal: tuple[object, ...] = ()) -> Refused:
    return Refused([Problem(key, value, reason, legal)])


# Megatron-LM


def megatron_arguments(job: Job) -> dict[str, object]:
    """Megatron-LM's arguments by name; True where one has no value."""
    model, layout, batch, run, adam = job.model, job.parallel, job.batch, job.run, job.optimizer
    if layout.schedule not in MEGATRON_SCHEDULES:
        raise _refused("parallel.schedule", layout.schedule, "Megatron-LM has no such schedule", MEGATRON_SCHEDULES)
    if layout.order[-1] != "tp":
        raise _refused("parallel.order", " ".join(layout.order), "Megatron-LM keeps tensor parallelism innermost")
    found: dict[str, object] = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn,
        "num-attention-heads": model.heads,
        "kv-channels": model.head_dim,
        "max-position-embeddings": model.context,
        "seq-length": batch.sequence,
        "micro-batch-size": batch.micro_batch,
        "global-batch-size": batch.global_batch,
        "train-iters": run.steps,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
    }
    if model.block == "llama":
        found |= {
            "normalization": "RMSNorm",
            "norm-epsilon": model.norm_eps,
            "position-embedding-type": "rope",
            "rotary-base": int(model.rope_theta),
            "swiglu": True,
            "disable-bias-linear": True,
        }
    if model.kv_heads < model.heads:
        found |= {"group-query-attention": True, "num-query-groups": model.kv_heads}
    found |= {"qk-layernorm": True} if model.qk_norm else {}
    found |= {"add-qkv-bias": True} if model.qkv_bias else {}
    found |= {} if model.tied else {"untie-embeddings-and-output-weights": True}
    found |= _megatron_experts(job)
    found |= _megatron_pipeline(job)
    found |= _megatron_zero(job)
    found |= {"sequence-parallel": True} if layout.sequence_parallel and layout.tp > 1 else {}
    recompute = _recompute(layout, "Megatron-LM")
    if recompute == "full":
        found |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif recompute == "selective":
        found["recompute-granularity"] = "selective"
    return found | {
        **({"bf16": True} if run.precision == "bf16" else {}),
        "lr": adam.lr,
        "min-lr": adam.lr * adam.min_lr_ratio,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": adam.warmup_steps,
        "weight-decay": adam.weight_decay,
        "adam-beta1": adam.beta1,
        "adam-beta2": adam.beta2,
        "adam-eps": adam.eps,
        "clip-grad": adam.clip_norm,
        "hidden-dropout": run.dropout,
        "attention-dropout": run.attention_dropout,
        "seed": run.seed,
    }


def _recompute(layout: Layout, tool: str) -> RecomputeName:
    """What all stages run again. Raises Refused where they differ."""
    words = tuple(dict.fromkeys(layout.recompute_of(stage) for stage in range(layout.stages)))
    if len(words) > 1:
        assert not isinstance(layout.recompute, str)
        reason = f"{tool} recomputes alike in all stages"
        raise _refused("parallel.recompute", list(layout.recompute), reason, words)
    return words[0]


def _megatron_experts(job: Job) -> dict[str, object]:
    experts, latent = job.model.experts, job.model.latent
    found: dict[str, object] = {}
    if experts:
        found = {
            "num-experts": experts.count,
            "moe-router-topk": experts.top_k,
            "moe-ffn-hidden-size": experts.ffn,
            "expert-model-parallel-size": job.parallel.ep,
        }
        found |= {"moe-shared-expert-intermediate-size": experts.shared_ffn} if experts.shared_ffn else {}
        if experts.dense_layers:
            sparse = job.model.layers - experts.dense_layers
            found["moe-layer-freq"] = f"([0]*{experts.dense_layers}+[1]*{sparse})"
    if latent:
        found |= {
            "multi-latent-attention": True,
            "kv-lora-rank": latent.kv_rank,
            "qk-head-dim": latent.nope_dim,
            "qk-pos-emb-head-dim": latent.rope_dim,
            "v-head-dim": latent.v_dim,
        }
        found |= {"q-lora-rank": latent.q_rank} if latent.q_rank else {}
    return found


def _megatron_pipeline(job: Job) -> dict[str, object]:
    layout = job.parallel
    split = layout.stage_layers or split_layers(job.model.layers, layout.stages)
    if len(set(split)) > 1:
        stages = ["t" * layers for layers in split]
        stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
        return {"pipeline-model-parallel-layout": "|".join(stages)}
    return {"num-layers-per-virtual-pipeline-stage": split[0]} if layout.virtual_stages > 1 else {}


def _megatron_zero(job: Job) -> dict[str, object]:
    layout = job.parallel
    policy = zero_policy(layout)
    if not policy.shard_optimizer:
        return {}
    found: dict[str, object] = {"use-distributed-optimizer": True}
    if layout.dp_replicate > 1:
        found["num-distributed-optimizer-instances"] = layout.dp_replicate
    if policy.shard_weights or policy.reduce_per_microbatch:
        strategy = "optim_grads_params" if policy.shard_weights else "optim_grads"
        return found | {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": strategy}
    return found | {"overlap-grad-reduce": True, "overlap-param-gather": True}


def _megatron(job: Job) -> Export:
    lines = [
        f"--{name}" if value is True else f"--{name} {shlex.quote(_plain(value))}"
        for name, value in megatron_arguments(job).items()
    ]
    notes = [f"data and tokenizer are not exported; start {job.parallel.world:,} processes with torchrun"]
    return Export(" \\\n".join(lines), tuple(notes))


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# torchtitan


def torchtitan_config(job: Job) -> dict[str, dict[str, object]]:
    """torchtitan's job configuration as tables."""
    layout, batch, run, adam = job.parallel, job.batch, job.run, job.optimizer
    if layout.schedule not in TITAN_SCHEDULES:
        raise _refused("parallel.schedule", layout.schedule, "torchtitan has no such schedule", tuple(TITAN_SCHEDULES))
    policy, microbatches = zero_policy(layout), batch.microbatches(layout)
    shards = layout.dp_shard if policy.shard_optimizer else 1
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": layout.dp // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "fsdp_reshard_after_forward": "always" if policy.gather_per_use else "never",
    }
    if layout.ep > 1:
        parallelism["expert_parallel_degree"] = layout.ep
    if layout.pp > 1:
        parallelism["pipeline_parallel_schedule"] = TITAN_SCHEDULES[layout.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = batch.micro_batch
    # A pipeline cuts the local batch into its microbatches; without one, the global batch is accumulated.
    local = batch.micro_batch * (microbatches if layout.pp > 1 else 1)
    return {
        "model": {"name": "llama3", "flavor": _flavor(job)},
        "training": {
            "local_batch_size": local,
            "global_batch_size": batch.global_batch,
            "seq_len": batch.sequence,
            "steps": run.steps,
            "max_norm": adam.clip_norm,
        },
        "optimizer": {
            "name": "AdamW",
            "lr": adam.lr,
            "beta1": adam.beta1,
            "beta2": adam.beta2,
            "eps": adam.eps,
            "weight_decay": adam.weight_decay,
        },
        "lr_scheduler": {
            "warmup_steps": adam.warmup_steps,
            "decay_type": "cosine",
            "min_lr_factor": adam.min_lr_ratio,
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": _recompute(layout, "torchtitan")},
        **({"compile": {"enable": True}} if run.compile else {}),
    }


def _flavor(job: Job) -> str:
    """torchtitan's name of a size: what stands behind the last dash."""
    return job.model.name.rpartition("-")[2].upper()


def _torchtitan(job: Job) -> Export:
    notes = ["model.name and model.flavor must be those of a model that torchtitan has; data is not exported"]
    if job.run.dropout or job.run.attention_dropout:
        notes.append("torchtitan has no dropout")
    policy = zero_policy(job.parallel)
    if policy.shard_optimizer and not policy.shard_weights:
        notes.append(f"torchtitan has no ZeRO-{job.parallel.zero}: its nearest is FSDP that never reshards")
    if job.parallel.virtual_stages > 1 and job.parallel.schedule not in V_SHAPED:
        stages = job.parallel.stages
        layers = -(-job.model.layers // stages)
        notes.append(f"for {stages} stages give parallelism.pipeline_parallel_layers_per_stage = {layers}")
    return Export(tomli_w.dumps(torchtitan_config(job)).rstrip(), tuple(notes))


# DeepSpeed


def deepspeed_config(job: Job) -> dict[str, object]:
    """DeepSpeed's configuration."""
    layout, batch, adam = job.parallel, job.batch, job.optimizer
    if layout.pp > 1 and layout.zero >= 2:
        raise _refused("parallel.zero", layout.zero, "DeepSpeed refuses ZeRO-2 and ZeRO-3 with pipelines", (0, 1))
    if layout.pp > 1 and layout.schedule != "1f1b":
        raise _refused("parallel.schedule", layout.schedule, "DeepSpeed's pipeline has one schedule", ("1f1b",))
    zero: dict[str, object] = {"stage": layout.zero}
    if layout.dp_replicate > 1 and layout.zero == 3:
        zero["mics_shard_size"] = layout.dp_shard
    found: dict[str, object] = {
        "train_batch_size": batch.global_batch,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.microbatches(layout),
        "gradient_clipping": adam.clip_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": job.run.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": adam.lr,
                "betas": [adam.beta1, adam.beta2],
                "eps": adam.eps,
                "weight_decay": adam.weight_decay,
            },
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": job.run.steps,
                "warmup_num_steps": adam.warmup_steps,
                "cos_min_ratio": adam.min_lr_ratio,
            },
        },
    }
    found |= {"tensor_parallel": {"autotp_size": layout.tp}} if layout.tp > 1 else {}
    found |= {"sequence_parallel_size": layout.cp} if layout.cp > 1 else {}
    return found


def _deepspeed(job: Job) -> Export:
    notes = ["the model, its dropout and recomputation and the data are not part of DeepSpeed's configuration"]
    if job.parallel.pp > 1:
        notes.append(f"pipeline stages are given in code: PipelineModule(num_stages={job.parallel.pp})")
    return Export(json.dumps(deepspeed_config(job), indent=2), tuple(notes))
