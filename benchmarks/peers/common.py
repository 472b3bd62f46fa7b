"""What every driver shares: the workload, its layouts, weights and tokens, and the turns that the launcher gives.

Nothing here comes from a peer. A driver puts the weights of `reference_weights` into the peer's own modules, feeds it
`microbatches(step, …)`, and hands the loss of each step to its `Turns`. So losses are comparable over peers and
layouts: the same weights, tokens and AdamW, no clipping, fp32, no dropout.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
MATMUL = os.environ.get("BENCH_MATMUL", "highest")
WATCH = bool(os.environ.get("BENCH_WATCH"))


@dataclass(frozen=True)
class Workload:
    """A Llama with untied embedding, and what it is trained with."""

    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 688
    vocab: int = 4096
    sequence: int = 256
    global_batch: int = 16
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    # Of every parameter, norms included: what all peers can do.
    weight_decay: float = 0.1
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    seed: int = 1234

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.sequence

    @property
    def parameters(self) -> int:
        kv = self.kv_heads * self.head_dim
        block = 2 * self.hidden * (self.hidden + kv + 1) + 3 * self.hidden * self.ffn
        return self.layers * block + 2 * self.hidden * self.vocab + self.hidden


WORKLOAD = Workload()


@dataclass(frozen=True)
class Cut:
    """A layout. zero: the ZeRO stage, 3 is FSDP; micro_batch: sequences of a microbatch."""

    name: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    micro_batch: int = 2

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def microbatches(self) -> int:
        """Of each data-parallel rank."""
        return WORKLOAD.global_batch // (self.dp * self.micro_batch)

    @property
    def held(self) -> float:
        """Parameters that a rank keeps between steps, on average over the ranks of a pipeline."""
        return WORKLOAD.parameters / (self.tp * self.pp * (self.dp if self.zero == 3 else 1))


LAYOUTS = {
    cut.name: cut
    for cut in (
        Cut("single"),
        Cut("ddp2", dp=2),
        Cut("zero1", dp=2, zero=1),
        Cut("zero2", dp=2, zero=2),
        Cut("zero3", dp=2, zero=3),
        Cut("tp2", tp=2),
        Cut("pp2", pp=2),
        Cut("pp2dp2", pp=2, dp=2, micro_batch=1),
        Cut("3d", dp=2, tp=2, pp=2, micro_batch=1),
        Cut("3dz", dp=2, tp=2, pp=2, zero=3, micro_batch=1),
    )
}


def adamw_options() -> dict[str, Any]:
    """For torch.optim.AdamW, which all contestants use."""
    w = WORKLOAD
    options = {"lr": w.lr, "betas": (w.beta1, w.beta2), "eps": w.eps, "weight_decay": w.weight_decay}
    return {**options, "fused": True}


def reference_weights() -> dict[str, Any]:
    """fp32 weights under the names of transformers' Llama, whose rotary positions pair a head's two halves."""
    import torch

    w, generator = WORKLOAD, torch.Generator().manual_seed(WORKLOAD.seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    kv = w.kv_heads * w.head_dim
    found = {"model.embed_tokens.weight": drawn(w.vocab, w.hidden)}
    for layer in range(w.layers):
        at = f"model.layers.{layer}."
        found[f"{at}self_attn.q_proj.weight"] = drawn(w.hidden, w.hidden)
        found[f"{at}self_attn.k_proj.weight"] = drawn(kv, w.hidden)
        found[f"{at}self_attn.v_proj.weight"] = drawn(kv, w.hidden)
        found[f"{at}self_attn.o_proj.weight"] = drawn(w.hidden, w.hidden)
        found[f"{at}mlp.gate_proj.weight"] = drawn(w.ffn, w.hidden)
        found[f"{at}mlp.up_proj.weight"] = drawn(w.ffn, w.hidden)
        found[f"{at}mlp.down_proj.weight"] = drawn(w.hidden, w.ffn)
        found[f"{at}input_layernorm.weight"] = torch.ones(w.hidden)
        found[f"{at}post_attention_layernorm.weight"] = torch.ones(w.hidden)
    found["model.norm.weight"] = torch.ones(w.hidden)
    found["lm_head.weight"] = drawn(w.vocab, w.hidden)
    return found


def to_interleaved(weight: Any, heads: int) -> Any:
    """Rows of a projection of queries or keys, for rotary positions that pair neighbours instead of halves."""
    out, into = weight.shape
    halves = weight.view(heads, 2, WORKLOAD.head_dim // 2, into)
    return halves.transpose(1, 2).reshape(out, into).contiguous()


def microbatches(step: int, dp_rank: int, cut: Cut) -> list[tuple[Any, Any]]:
    """(inputs, targets) of each microbatch of a data-parallel rank in step 1, 2, …: tokens of skewed frequencies, so
    that the loss moves."""
    import torch

    w = WORKLOAD
    generator = torch.Generator().manual_seed(w.seed * 1000 + step)
    drawn = torch.rand(w.global_batch, w.sequence + 1, generator=generator)
    tokens = (drawn.pow(3) * w.vocab).long().clamp_(max=w.vocab - 1)
    mine = tokens.chunk(cut.dp)[dp_rank]
    return [(m[:, :-1].contiguous(), m[:, 1:].contiguous()) for m in mine.split(cut.micro_batch)]


def held(parameters: Iterable[Any]) -> int:
    """Elements that this rank keeps of `parameters` while idle: the proof that a layout really shards them, since a
    peer may fall back to another without a word."""
    total = 0
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor"):
            total += parameter.ds_tensor.numel()
        elif hasattr(parameter, "to_local"):
            total += parameter.to_local().numel()
        else:
            total += parameter.numel()
    return total


def peak_resident_bytes() -> int:
    """Of this program: unlike ru_maxrss, not of the one that it was started from."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


class Turns:
    """The steps that the launcher asks for; to be made as soon as everything is imported, before groups of processes.

    version: of the contestant; settings: its choices in this layout. Without a launcher there are a few steps, whose
    figures the first rank prints.
    """

    def __init__(self, version: str, settings: str = "") -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        torch.set_float32_matmul_precision(MATMUL)
        _touch_lazy_imports()
        fd = os.environ.get("BENCH_FD")
        self._launcher = socket.socket(fileno=int(fd)).makefile("rw") if fd else None
        self._about = {"version": version, "settings": settings, "torch": torch.__version__}
        self._imported_bytes = peak_resident_bytes()
        self._meter = AllocationMeter() if WATCH else None
        self._live_bytes = 0
        self._wall: list[float] = []
        self._cpu: list[float] = []
        self._losses: list[float | None] = []

    def ready(self, held: int) -> None:
        """Model and optimizer are there; held: see the function of this name."""
        self._say({**self._about, "held": held, "imported_bytes": self._imported_bytes})

    def __iter__(self) -> Iterator[int]:
        """Numbers of steps, from 1 on, for as long as the launcher asks for more."""
        step = 0
        while asked := self._asked(step):
            for _ in range(asked):
                step += 1
                yield step
            figures = {"wall_s": self._wall, "cpu_s": self._cpu, "loss": self._losses}
            self._say({**figures, "peak_bytes": peak_resident_bytes(), "live_bytes": self._live_bytes})
            self._wall, self._cpu, self._losses = [], [], []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a step, from its first forward to the end of its optimizer. CPU seconds are of all threads."""
        wall, cpu = time.perf_counter(), time.process_time()
        if self._meter:
            with self._meter.step():
                yield
            self._live_bytes = self._meter.peak_bytes
        else:
            yield
        self._wall.append(time.perf_counter() - wall)
        self._cpu.append(time.process_time() - cpu)

    def loss(self, value: Any) -> None:
        """The mean over the step's tokens on all ranks, or None on ranks that do not know it."""
        self._losses.append(None if value is None else float(value))

    def _asked(self, step: int) -> int:
        if self._launcher is None:
            return 0 if step else 5
        return int(self._launcher.readline() or 0)

    def _say(self, what: dict[str, Any]) -> None:
        if self._launcher is not None:
            self._launcher.write(json.dumps(what) + "\n")
            self._launcher.flush()
        elif RANK == 0:
            print(json.dumps(what), flush=True)


class AllocationMeter:
    """Bytes that torch's allocator for CPUs has given out and not taken back, in all threads, from now on.

    Unlike storages that an operation returns, these include what a kernel, a reducer in C++ or a tensor subclass makes
    for itself, so that all contestants are measured alike. What libraries allocate past torch is not seen. peak_bytes:
    the most in the step that was last.
    """

    def __init__(self) -> None:
        import torch

        # Without this flag allocations are counted only in threads that run under a profiler.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
        self.peak_bytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
        self.peak_bytes = 0
        while waiting:
            event = waiting.pop()
            waiting += event.children
            if event.name == "[memory]":
                self.peak_bytes = max(self.peak_bytes, event.extra_fields.total_allocated)


def _touch_lazy_imports() -> None:
    """What torch imports at the first step is part of imports, for those too who do not import it before."""
    import torch

    weight = torch.nn.Parameter(torch.ones(8, 8))
    (weight @ weight).sum().backward()
    torch.optim.AdamW([weight], fused=True).step()
