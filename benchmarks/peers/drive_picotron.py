"""picotron, from a checkout that PICOTRON names, on CPU and gloo: its Llama, tensor parallelism, 1F1B and bucketed data
parallelism. It has no ZeRO.

Changed for a machine without CUDA: stand-ins for flash_attn, which it imports whether or not it is used;
torch.cuda.synchronize, called after every message of the pipeline, does nothing; DTYPE, else its rotary tables are
bf16. Its own loader, download of models and first weights are not used. Its 1F1B does not divide the loss by the number
of microbatches before backward: gradients are so many times too large, which AdamW hides but for its eps.
"""

# ruff: noqa: E402 (what is changed must be before it is imported)

from __future__ import annotations

import argparse
import os
import sys
import types
from typing import Any

os.environ.update(DEVICE="cpu", FLASH_ATTEN="0", DTYPE="float32", CONTEXT_PARALLEL="0")
sys.path.append(os.environ["PICOTRON"])

import torch
import torch.distributed as dist
from common import LAYOUTS, RANK, WORKLOAD, WORLD, Cut, Turns, adamw_options, held, microbatches, reference_weights
from torch import nn

STAND_INS = {
    "flash_attn": (),
    "flash_attn.flash_attn_interface": ("flash_attn_func",),
    "flash_attn.layers": (),
    "flash_attn.layers.rotary": ("apply_rotary_emb",),
    "flash_attn.ops": (),
    "flash_attn.ops.triton": (),
    "flash_attn.ops.triton.layer_norm": ("layer_norm_fn",),
}
for name, attributes in STAND_INS.items():
    module = types.ModuleType(name)
    module.__path__ = []
    for attribute in attributes:
        setattr(module, attribute, None)
    sys.modules[name] = module
torch.cuda.synchronize = lambda *_, **__: None

import picotron.process_group_manager as groups
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model import Llama
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, train_step_pipeline_1f1b
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from picotron.utils import average_loss_across_dp_cp_ranks
from train import train_step

NAMES = {
    "model.layers": "decoder_layers",
    "self_attn.o_proj": "attention.out_proj",
    "self_attn": "attention",
    "model.embed_tokens": "embedding",
    "model.norm": "final_norm",
    "lm_head": "final_proj",
}
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embedding", "final_proj")
ROW = ("out_proj", "down_proj")


def set_weights(model: nn.Module, tp: int, index: int) -> None:
    found = {}
    for name, weight in reference_weights().items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        layer = name.split(".")[-2]
        if layer in COLUMN + ROW:
            weight = weight.chunk(tp, 1 if layer in ROW else 0)[index].contiguous()
        found[name] = weight
    model.load_state_dict({name: found[name] for name in model.state_dict()})


class Loader:
    """What picotron's steps take microbatches from."""

    def __init__(self, cut: Cut, dp_rank: int):
        self.grad_acc_steps = cut.microbatches
        self._cut, self._dp_rank = cut, dp_rank
        self._waiting: list[dict[str, Any]] = []

    def fill(self, step: int) -> None:
        positions = torch.arange(WORKLOAD.sequence).unsqueeze(0).expand(self._cut.micro_batch, -1).contiguous()
        self._waiting = [
            {"input_ids": tokens, "target_ids": targets, "position_ids": positions, "hidden_states": None}
            for tokens, targets in microbatches(step, self._dp_rank, self._cut)
        ]

    def __next__(self) -> dict[str, Any]:
        return self._waiting.pop(0)


def model_of(cut: Cut) -> nn.Module:
    w = WORKLOAD
    config = types.SimpleNamespace(
        hidden_size=w.hidden,
        num_attention_heads=w.heads,
        num_key_value_heads=w.kv_heads,
        vocab_size=w.vocab,
        intermediate_size=w.ffn,
        num_hidden_layers=w.layers,
        max_position_embeddings=w.sequence,
        rms_norm_eps=w.norm_eps,
        rope_theta=w.rope_theta,
    )
    model = Llama(config=config)
    if cut.tp > 1:
        model = apply_tensor_parallel(model)
    if cut.pp > 1:
        model = PipelineParallel(model, config)
    set_weights(model, cut.tp, groups.process_group_manager.tp_rank)
    return DataParallelBucket(model) if cut.dp > 1 else model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="single", choices=LAYOUTS)
    cut = LAYOUTS[parser.parse_args().layout]
    turns = Turns("")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    groups.setup_process_group_manager(cut.tp, 1, cut.pp, cut.dp)
    manager = groups.process_group_manager
    model = model_of(cut)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options())
    loader, device = Loader(cut, manager.dp_rank), torch.device("cpu")
    shape = (cut.micro_batch, WORKLOAD.sequence, WORKLOAD.hidden)
    model.train()
    turns.ready(held(model.parameters()))
    for step in turns:
        loader.fill(step)
        with turns.timed():
            optimizer.zero_grad()
            if cut.pp > 1:
                loss = train_step_pipeline_1f1b(model, loader, shape, device, torch.float32)
            else:
                loss = train_step(model, loader, device)
            loss = average_loss_across_dp_cp_ranks(loss, device)
            optimizer.step()
            if hasattr(model, "reset"):
                model.reset()
        turns.loss(loss if manager.pp_is_last_stage else None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
