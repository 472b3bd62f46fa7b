"""DeepSpeed's engine on CPU and gloo, around the plain Llama: ZeRO 0 to 3, PipelineModule, AutoTP.

DeepSpeed brings no model. Its tensor parallelism cuts the plain one's layers by `partition_config`, and leaves
embedding and head whole. It has none inside a PipelineModule, so there is no 3D layout.
"""

# ruff: noqa: E402 (what is changed must be before it is imported)

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", DS_IGNORE_CUDA_DETECTION="1")
for name, value in dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29513").items():
    os.environ.setdefault(name, value)

import deepspeed
import torch
import torch.distributed as dist
from common import LAYOUTS, RANK, WORKLOAD, Cut, Turns, adamw_options, held, microbatches, reference_weights
from deepspeed.pipe import LayerSpec, PipelineModule
from plain import Block, Llama, Norm, mean_loss, rope_tables
from torch import Tensor, nn


class PipelinedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        cos, sin = rope_tables()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.cos, self.sin)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORKLOAD.vocab, WORKLOAD.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lm_head = Norm(WORKLOAD.hidden), nn.Linear(WORKLOAD.hidden, WORKLOAD.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def pipeline(cut: Cut) -> PipelineModule:
    layers = [LayerSpec(Embedding), *(LayerSpec(PipelinedBlock) for _ in range(WORKLOAD.layers)), LayerSpec(Head)]
    model = PipelineModule(layers, num_stages=cut.pp, loss_fn=mean_loss, partition_method="type:PipelinedBlock")
    weights = reference_weights()

    def source(name: str) -> str:
        number, rest = name.split(".", 1)
        if rest.startswith("block."):
            return rest.replace("block.", f"model.layers.{int(number) - 1}.", 1)
        return rest if rest.startswith("lm_head") else f"model.{rest}"

    model.load_state_dict({name: weights[source(name)] for name in model.state_dict()})
    return model


def config_of(cut: Cut) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": cut.micro_batch,
        "gradient_accumulation_steps": cut.microbatches,
        "zero_optimization": {"stage": cut.zero, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if cut.tp == 1:
        return {**config, "train_batch_size": WORKLOAD.global_batch}
    # Without train_batch_size, whose arithmetic does not know the ranks of AutoTP.
    column = r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$"
    row = r".*\.(o_proj|down_proj)\.weight$"
    specs = [
        {"patterns": [row], "partition_type": "row"},
        {"patterns": [column], "partition_type": "column"},
    ]
    partition = {"use_default_specs": False, "layer_specs": specs}
    return {**config, "tensor_parallel": {"autotp_size": cut.tp, "partition_config": partition}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="single", choices=LAYOUTS)
    cut = LAYOUTS[parser.parse_args().layout]
    turns = Turns(deepspeed.__version__)
    deepspeed.init_distributed(dist_backend="gloo")
    if cut.pp > 1:
        model: nn.Module = pipeline(cut)
    else:
        model = Llama()
        model.load_state_dict(reference_weights())

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **adamw_options())

    optimizer: Callable[..., Any] | torch.optim.Optimizer = adamw if cut.tp > 1 else adamw(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=list(model.parameters()) if cut.tp > 1 else None,
        config=config_of(cut),
    )
    dp_rank = engine.grid.get_data_parallel_rank() if cut.pp > 1 else RANK // cut.tp
    turns.ready(held(engine.module.parameters()))
    for step in turns:
        batches = microbatches(step, dp_rank, cut)
        if cut.pp > 1:
            with turns.timed():
                loss = engine.train_batch(iter(batches))
            # The mean over data parallelism, which DeepSpeed has told all ranks.
            turns.loss(loss)
            continue
        with turns.timed():
            total = torch.zeros(())
            for tokens, targets in batches:
                loss = mean_loss(engine(tokens), targets)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(batches)
        if cut.dp > 1:
            dist.all_reduce(total)
        turns.loss(total / cut.dp)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
