"""megatron-core on CPU and gloo: its GPTModel, tensor-parallel layers, 1F1B schedule and DistributedDataParallel.

Changed for a machine without CUDA: its calls of torch.cuda and its literal device="cuda" mean the CPU, its tracker of
CUDA's random states does nothing. Its local layers (not Transformer Engine's), all fusions off, torch's AdamW on its
fp32 gradients, since its own optimizer needs Transformer Engine or apex to be fused.
"""

# ruff: noqa: E402 (what is changed must be before it is imported)

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import LAYOUTS, RANK, WORKLOAD, WORLD, Cut, Turns, adamw_options, held, microbatches, reference_weights
from torch import Tensor


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*args, **options)

    return made


torch.cuda.current_device = lambda: "cpu"
for name in ("synchronize", "set_device", "empty_cache", "current_stream"):
    setattr(torch.cuda, name, lambda *_, **__: None)
for name in ("zeros", "ones", "empty", "tensor", "full", "arange", "rand", "randn"):
    setattr(torch, name, on_cpu(getattr(torch, name)))
torch.Tensor.cuda = lambda self, *_, **__: self
torch.nn.Module.cuda = lambda self, *_, **__: self

import megatron.core
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig


class NoTracker:
    """Of random states; nothing here is random after the weights."""

    def is_initialized(self) -> bool:
        return True

    def fork(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add(self, *_: Any) -> None:
        pass


random._CUDA_RNG_STATE_TRACKER = NoTracker()
random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
random.initialize_rng_tracker = lambda *_, **__: None


def weight_of(name: str, reference: dict[str, Tensor], tp: int, index: int, first_layer: int) -> Tensor:
    """This rank's part of a parameter of Megatron's."""
    w = WORKLOAD

    def part(weight: Tensor, dim: int) -> Tensor:
        return weight.chunk(tp, dim)[index]

    if name.startswith("embedding.word"):
        return part(reference["model.embed_tokens.weight"], 0)
    if name.startswith("output_layer"):
        return part(reference["lm_head.weight"], 0)
    if name.startswith("decoder.final"):
        return reference["model.norm.weight"]
    _, _, layer, rest = name.split(".", 3)
    at = f"model.layers.{int(layer) + first_layer}."
    if rest == "self_attention.linear_qkv.weight":
        # By KV head: its query heads, its keys, its values.
        names = (f"{at}self_attn.{which}_proj.weight" for which in "qkv")
        heads = [reference[n].view(w.kv_heads, -1, w.head_dim, w.hidden) for n in names]
        return part(torch.cat(heads, 1).reshape(-1, w.hidden), 0)
    if rest == "self_attention.linear_proj.weight":
        return part(reference[f"{at}self_attn.o_proj.weight"], 1)
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([part(reference[f"{at}mlp.{which}_proj.weight"], 0) for which in ("gate", "up")])
    if rest == "mlp.linear_fc2.weight":
        return part(reference[f"{at}mlp.down_proj.weight"], 1)
    return reference[f"{at}input_layernorm.weight"]


def model_of(cut: Cut) -> GPTModel:
    w = WORKLOAD
    config = TransformerConfig(
        num_layers=w.layers,
        hidden_size=w.hidden,
        num_attention_heads=w.heads,
        num_query_groups=w.kv_heads,
        ffn_hidden_size=w.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=w.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=cut.tp,
        pipeline_model_parallel_size=cut.pp,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=w.vocab,
        max_sequence_length=w.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=w.rope_theta,
        parallel_output=True,
    )
    reference = reference_weights()
    index = parallel_state.get_tensor_model_parallel_rank()
    first_layer = parallel_state.get_pipeline_model_parallel_rank() * w.layers // cut.pp
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weight_of(name, reference, cut.tp, index, first_layer)
            assert parameter.shape == weight.shape, (name, parameter.shape, weight.shape)
            parameter.copy_(weight)
    return model


def mean(targets: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    # A clone, since the schedule divides the loss in place.
    return loss, {"loss": loss.detach().clone()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="single", choices=LAYOUTS)
    cut = LAYOUTS[parser.parse_args().layout]
    turns = Turns(megatron.core.__version__)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29514")
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cut.tp, pipeline_model_parallel_size=cut.pp, create_gloo_process_groups=False
    )
    module = model_of(cut)
    wrapping = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    model = DistributedDataParallel(config=module.config, ddp_config=wrapping, module=module)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, **adamw_options())
    schedule = get_forward_backward_func()
    positions = torch.arange(WORKLOAD.sequence).unsqueeze(0).expand(cut.micro_batch, -1)
    mask = torch.ones(WORKLOAD.sequence, WORKLOAD.sequence, dtype=torch.bool).triu(1)[None, None]

    def forward(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        tokens, targets = next(batches)
        return model(tokens, positions, mask, labels=targets), partial(mean, targets)

    turns.ready(held(parameters))
    for step in turns:
        batches = microbatches(step, parallel_state.get_data_parallel_rank(), cut)
        with turns.timed():
            model.zero_grad_buffer()
            outputs = schedule(
                forward_step_func=forward,
                data_iterator=iter(batches),
                model=model,
                num_microbatches=cut.microbatches,
                seq_length=WORKLOAD.sequence,
                micro_batch_size=cut.micro_batch,
                forward_only=False,
            )
            for parameter in parameters:
                parameter.grad = parameter.main_grad
            optimizer.step()
            for parameter in parameters:
                # Else the next backward would add main_grad to itself.
                parameter.grad = None
        loss = None
        if parallel_state.is_pipeline_last_stage():
            loss = sum(output["loss"] for output in outputs) / len(outputs)
            if cut.dp > 1:
                dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
                loss /= cut.dp
        turns.loss(loss)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
