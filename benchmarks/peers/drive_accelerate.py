"""transformers' Llama under Accelerate on CPU and gloo: one process, DistributedDataParallel, FSDP2, and transformers'
own tp_plan="auto". It trains no pipelines.

Needs ACCELERATE_USE_CPU. On CPUs Accelerate passes over its FSDP plugin without a word and trains with
DistributedDataParallel, so the driver sets the distributed type itself; what is held proves it.
"""

# ruff: noqa: E402 (what is changed must be before it is imported)

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"
for name, value in dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29515").items():
    os.environ.setdefault(name, value)

import accelerate
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from common import LAYOUTS, RANK, WORKLOAD, WORLD, Cut, Turns, adamw_options, held, microbatches, reference_weights
from plain import mean_loss
from transformers import LlamaConfig, LlamaForCausalLM


def config() -> LlamaConfig:
    w = WORKLOAD
    return LlamaConfig(
        hidden_size=w.hidden,
        num_hidden_layers=w.layers,
        num_attention_heads=w.heads,
        num_key_value_heads=w.kv_heads,
        intermediate_size=w.ffn,
        vocab_size=w.vocab,
        max_position_embeddings=w.sequence,
        rms_norm_eps=w.norm_eps,
        tie_word_embeddings=False,
        use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": w.rope_theta},
        attn_implementation="sdpa",
        dtype="float32",
    )


def whole() -> LlamaForCausalLM:
    model = LlamaForCausalLM(config())
    model.load_state_dict(reference_weights())
    return model


def tensor_parallel() -> LlamaForCausalLM:
    """Cut as it is read from files, which is the only way."""
    folder: list[Any] = [None]
    with tempfile.TemporaryDirectory() as own:
        if RANK == 0:
            whole().save_pretrained(own)
            folder = [own]
        dist.broadcast_object_list(folder)
        model = LlamaForCausalLM.from_pretrained(
            folder[0], tp_plan="auto", dtype=torch.float32, attn_implementation="sdpa"
        )
        dist.barrier()
    return model


def accelerator_of(cut: Cut) -> Accelerator:
    if cut.zero < 3:
        return Accelerator(cpu=True, gradient_accumulation_steps=cut.microbatches)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=cut.microbatches, fsdp_plugin=plugin)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="single", choices=LAYOUTS)
    cut = LAYOUTS[parser.parse_args().layout]
    # Of the parameters only some are DTensors under tp_plan, which torch's fused AdamW does not take together.
    fused = cut.tp == 1
    versions = f"{accelerate.__version__}, transformers {transformers.__version__}"
    turns = Turns(versions, "" if fused else "AdamW not fused")
    if WORLD > 1:
        dist.init_process_group("gloo")
    model: Any = tensor_parallel() if cut.tp > 1 else whole()
    model.train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), **{**adamw_options(), "fused": fused})
    accelerator = accelerator_of(cut) if cut.tp == 1 else None
    if accelerator:
        model, optimizer = accelerator.prepare(model, optimizer)
    turns.ready(held(model.parameters()))
    for step in turns:
        batches = microbatches(step, RANK // cut.tp, cut)
        with turns.timed():
            total = torch.zeros(())
            for tokens, targets in batches:
                if accelerator:
                    # It divides by the number of microbatches, and updates and clears only after the last.
                    with accelerator.accumulate(model):
                        loss = mean_loss(model(input_ids=tokens).logits, targets)
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                else:
                    loss = mean_loss(model(input_ids=tokens).logits, targets)
                    (loss / len(batches)).backward()
                total += loss.detach() / len(batches)
            if not accelerator:
                optimizer.step()
                optimizer.zero_grad()
        if cut.dp > 1:
            dist.all_reduce(total)
        turns.loss(total / cut.dp)
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
