"""torchtitan's own Trainer on CPU and gloo.

Changed for a machine without an accelerator, which it takes for granted as it is imported:
- torch's accelerator is the CPU, which gains the few functions of torch.cuda that are asked for;
- a module that imports triton without need is left out;
- attention is its SDPA module, which it no longer offers for language models: "flex" has no backward on CPUs and
  "varlen" needs CUDA;
- FSDP2 sums without scaling, since gloo has no PREMUL_SUM;
- with torch 2.13, spmd_backend = "partial_dtensor" (the default needs a newer FSDP2 beyond one process), and the
  pipeline's step is given microbatches as that torch takes them.
Its gradient norm is computed, as in trigrid, and clips nothing.
"""

# ruff: noqa: E402 (what is changed must be before it is imported)

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

for name, value in dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512").items():
    os.environ.setdefault(name, value)

import torch
import torch._utils
from common import LAYOUTS, WORKLOAD, Cut, Turns, held, microbatches, reference_weights, to_interleaved
from torch import Tensor, nn

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=24 << 30)
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = torch.cpu.set_device = lambda *_: None
torch.cpu.current_device = lambda: 0


def stand_in(name: str) -> Any:
    """Of a module that is imported and never used: any attribute is a class or a function that does nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {}) if name[0].isupper() else lambda *_, **__: None


for name in ("minimal_async_ep", "minimal_async_ep.api"):
    module = types.ModuleType(f"torchtitan.distributed.{name}")
    module.__path__, module.__getattr__ = [], stand_in
    sys.modules[module.__name__] = module

import torchtitan.models.llama3 as llama3
import torchtitan.tools.utils
from torch.distributed._composable.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CompileConfig, DebugConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

# It would ask lspci.
torchtitan.tools.utils.get_peak_flops = lambda _: 1e12
llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any):
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORKLOAD.vocab


class Tokens(BaseDataLoader):
    """waiting: microbatches of the step that comes next."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any):
        self.dp_rank = dp_rank
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens, targets = self.waiting.pop(0)
            yield {"input": tokens}, targets

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass


def model_config() -> llama3.Llama3Model.Config:
    w = WORKLOAD
    return llama3.Llama3Model.Config(
        dim=w.hidden,
        vocab_size=w.vocab,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=w.vocab, embedding_dim=w.hidden, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=w.hidden, param_init=llama3._NORM_INIT, eps=w.norm_eps),
        lm_head=llama3.Linear.Config(
            in_features=w.hidden, out_features=w.vocab, param_init=llama3._output_linear_init(w.hidden)
        ),
        layers=llama3._build_llama3_layers(
            fuse_qkv=True,
            n_layers=w.layers,
            dim=w.hidden,
            n_heads=w.heads,
            n_kv_heads=w.kv_heads,
            hidden_dim=w.ffn,
            rope=llama3.ComplexRoPE.Config(dim=w.head_dim, max_seq_len=w.sequence, theta=w.rope_theta),
            attn_backend="sdpa",
        ),
    )


NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "model.layers": "layers",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def titan_weights() -> dict[str, Tensor]:
    """By torchtitan's names: rotary positions pair neighbours, and queries, keys and values lie in one matrix, by KV
    head."""
    w, reference = WORKLOAD, reference_weights()
    found = {}
    for layer in range(w.layers):
        at = f"model.layers.{layer}.self_attn."
        q, k, v = (reference.pop(f"{at}{which}_proj.weight") for which in "qkv")
        parts = to_interleaved(q, w.heads), to_interleaved(k, w.kv_heads), v
        heads = [part.view(w.kv_heads, -1, w.head_dim, w.hidden) for part in parts]
        found[f"layers.{layer}.attention.qkv_linear.wqkv.weight"] = torch.cat(heads, 1).reshape(-1, w.hidden)
    for name, weight in reference.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = weight
    return found


def set_weights(model: nn.Module) -> None:
    weights = titan_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                part = distribute_tensor(weights[name], mesh, placements, src_data_rank=None)
                parameter.to_local().copy_(part.to_local())
            else:
                parameter.copy_(weights[name])


def trainer_of(cut: Cut) -> Trainer:
    spec = llama3.ModelSpec(
        name="llama3",
        flavor="benchmark",
        model=model_config(),
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=llama3.pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    w = WORKLOAD
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=tempfile.mkdtemp(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=w.vocab),
        optimizer=default_adamw(lr=w.lr, betas=(w.beta1, w.beta2), eps=w.eps, weight_decay=w.weight_decay),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=cut.micro_batch * (cut.microbatches if cut.pp > 1 else 1),
            global_batch_size=w.global_batch,
            seq_len=w.sequence,
            steps=10**6,
            max_norm=float("inf"),
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
            dtype="float32",
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=1 if cut.zero else cut.dp,
            data_parallel_shard_degree=cut.dp if cut.zero else 1,
            tensor_parallel_degree=cut.tp,
            pipeline_parallel_degree=cut.pp,
            pipeline_parallel_schedule="1F1B",
            pipeline_parallel_microbatch_size=cut.micro_batch,
            pipeline_parallel_first_stage_less_layers=0,
            pipeline_parallel_last_stage_less_layers=0,
            spmd_backend="partial_dtensor",
            enable_sequence_parallel=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
        compile=CompileConfig(enable=False),
        debug=DebugConfig(enable_structured_logging=False),
        activation_checkpoint=None,
    )
    trainer = Trainer(config)
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        set_weights(part)
    if cut.pp > 1:
        _take_microbatches(trainer.pp_schedule)
    return trainer


def _take_microbatches(schedule: Any) -> None:
    """Before torch 2.14 `step` takes whole batches, which torchtitan no longer makes."""
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        return

    def step(
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        loss_kwargs: Any = None,
        return_outputs: bool = False,
    ) -> None:
        schedule._stage.has_backward = True
        schedule._stage.clear_runtime_states()
        args = arg_mbs or [()] * len(kwarg_mbs)
        schedule._step_microbatches(args, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)

    schedule.step = step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="single", choices=LAYOUTS)
    cut = LAYOUTS[parser.parse_args().layout]
    turns = Turns(version("torchtitan"), "sequence parallel" if cut.tp > 1 else "")
    trainer = trainer_of(cut)
    knows_loss = cut.pp == 1 or trainer.pp_has_last_stage
    seen: dict[str, Any] = {}
    trainer.metrics_processor.log = lambda step, loss, *_, **__: seen.update(loss=loss)
    batches = trainer.batch_generator(trainer.dataloader)
    turns.ready(held(p for part in trainer.model_parts for p in part.parameters()))
    for step in turns:
        trainer.step = step
        trainer.dataloader.waiting = microbatches(step, trainer.dataloader.dp_rank, cut)
        with turns.timed():
            trainer.gc_handler.run(step)
            trainer.train_step(batches)
        turns.loss(seen["loss"] if knows_loss else None)
    torch.distributed.barrier()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
