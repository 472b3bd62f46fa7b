"""A job: model, cluster, layout, and how long and on what it trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trigrid.spec.cluster import Cluster
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Batch:
    """global_batch and micro_batch count sequences of `sequence` tokens."""

    global_batch: int
    sequence: int
    micro_batch: int = 1

    def microbatches(self, layout: Layout) -> int:
        """Microbatches of each data-parallel rank per step: global_batch = dp × micro_batch × microbatches."""
        return self.global_batch // (layout.dp * self.micro_batch)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with linear warm-up, then a cosine to lr × min_lr_ratio at the last step; clip_norm = 0 does not clip.

    Weight decay acts on matrices, not on norms and biases.
    """

    lr: float = 3e-4
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Data:
    """corpus: "stdlib" (the Python standard library's own source), files and folders of text or JSON Lines, or token
    files.

    weights: shares of the corpora in every batch, one for each; empty: all documents as one corpus.
    text_key: where a JSON object holds its text. tokenizer: "train" trains a byte-level BPE of the model's vocabulary
    on the corpus; otherwise a tokenizer's file. document_attention: tokens attend within their own document only.
    workers: threads that read batches ahead; 0 reads each when it is needed.
    """

    corpus: tuple[str, ...] = ("stdlib",)
    weights: tuple[float, ...] = ()
    text_key: str = "text"
    tokenizer: str = "train"
    validation_fraction: float = 0.02
    document_attention: bool = False
    workers: int = 1
    cache: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """steps: optimizer steps. device "auto": CUDA where there is one for each local process, else CPU.

    trackers: who is told of every step beside `metrics.jsonl`.
    """

    steps: int
    seed: int = 0
    precision: Literal["fp64", "fp32", "bf16"] = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: str = "runs"
    log_every: int = 1
    validate_every: int = 0
    validation_batches: int = 4
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "prometheus"], ...] = ("tensorboard",)
    prometheus_port: int = 9464


@dataclass(frozen=True, kw_only=True)
class Job:
    model: ModelSpec
    batch: Batch
    run: Run
    parallel: Layout = field(default_factory=Layout)
    cluster: Cluster = field(default_factory=Cluster)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: Data = field(default_factory=Data)
