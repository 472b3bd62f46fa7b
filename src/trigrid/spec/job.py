"""A job: model, cluster, layout, and how long and on what it trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trigrid.spec.cluster import Cluster
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

MatmulPrecision = Literal["highest", "high", "medium"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of a step: global_batch = dp · micro_batch · accumulation. A job file may give the last instead."""

    global_batch: int
    """Sequences of an optimizer step, over all ranks; left out: dp · micro_batch · accumulation."""
    sequence: int
    """Length of a sequence, in tokens."""
    micro_batch: int = 1
    """Sequences that a rank takes at a time."""

    def microbatches(self, layout: Layout) -> int:
        """Microbatches of each data-parallel rank per step: the accumulation of the batch equation."""
        return self.global_batch // (layout.dp * self.micro_batch)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and its learning rate."""

    lr: float = 3e-4
    """The highest learning rate."""
    warmup_steps: int = 0
    """Steps of linear warm-up, the last of which reaches lr."""
    decay: Literal["cosine", "linear", "wsd"] = "cosine"
    """The rate's way from lr down to the last step's: all the way after the warm-up, or (wsd: warm-up, stable, decay)
    level first and then linear."""
    decay_share: float = 0.2
    """Share of the run's steps, at its end, in which wsd goes down."""
    min_lr_ratio: float = 0.1
    """The last step's learning rate, as a share of lr."""
    beta1: float = 0.9
    """How much of its old value the mean of the gradients keeps at each step."""
    beta2: float = 0.95
    """How much of its old value the mean of the squared gradients keeps at each step."""
    eps: float = 1e-8
    """Added to the root of the mean square that divides a step."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    clip_norm: float = 1.0
    """Largest L2 norm of the whole gradient; 0: it is not clipped."""
    frozen: tuple[str, ...] = ()
    """Parameters that keep their values, by patterns of their names such as ["embedding.*", "layers.[0-7].*"]; they
    have no gradients, moments or masters."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Corpora, tokenizer, and how they are read."""

    corpus: tuple[str, ...] = ("stdlib",)
    """Corpora: "stdlib" (the source of Python's standard library), a text file, a folder, a .jsonl file, a prepared
    folder, the prefix of Megatron's .bin and .idx, or "hf:NAME" of Hugging Face datasets."""
    weights: tuple[float, ...] = ()
    """Share of each corpus in the samples, in any unit, such as [3, 1]; empty: all documents alike."""
    text_key: str = "text"
    """Where an object of a .jsonl file or of a Hugging Face dataset holds its text."""
    tokenizer: str = "train"
    """"train" (a byte-level BPE of model.vocab entries, trained on the corpus), a tokenizers .json, a SentencePiece
    .model or a .tiktoken file."""
    validation_fraction: float = 0.02
    """Share of the documents that is held out for validation."""
    document_attention: bool = False
    """Tokens attend only within their own document."""
    workers: int = 1
    """Threads that read batches ahead; 0: each is read when it is needed."""
    cache: str = ""
    """Folder that keeps prepared data; empty: the user's cache folder."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the job."""

    steps: int
    """Optimizer steps."""
    seed: int = 0
    """Seed of the initial weights, of the order of samples and of dropout, all the same for every layout."""
    precision: Literal["fp64", "fp32", "bf16"] = "bf16"
    """Number format of weights and activations in use; bf16 keeps fp32 gradients, masters and moments."""
    matmul_precision: MatmulPrecision = "highest"
    """How products of fp32 matrices are computed, in torch's words: high and medium are TF32 on CUDA, and on a CPU
    kernels of oneDNN, refused unless they are about as exact as highest."""
    compile: bool = False
    """Run blocks as graphs of torch.compile, one for layers alike; needs a C++ compiler on a CPU, Triton on CUDA."""
    dropout: float = 0.0
    """Share of the elements that are dropped after the embedding and from what attention and feed-forward add."""
    attention_dropout: float = 0.0
    """Share of the attention's probabilities that are dropped; above 0 attention is not fused and keeps them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; auto: on CUDA where every rank of a node has a device, else on the CPU."""
    out: str = "runs"
    """Folder of all runs; each gets a folder of its own in it."""
    log_every: int = 1
    """Steps between two lines of the log."""
    validate_every: int = 0
    """Steps between two validations; 0: never."""
    validation_batches: int = 4
    """Global batches of a validation."""
    check_copies: bool = False
    """After every step, compare all copies of a weight bit for bit, and the step, rate and samples of all ranks; before
    it, look for what the one before has left over."""
    trace_step: int = 0
    """Step whose timeline on every rank is written to trace.json; 0: none."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "prometheus"], ...] = ("tensorboard",)
    """Who is told of each logged step, beside metrics.jsonl."""
    prometheus_port: int = 9464
    """TCP port on which the first rank answers Prometheus, if it is among the trackers."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is kept of a run, so that it can go on after any end."""

    every: int = 200
    """Steps between two checkpoints, of which the run's last step always makes one; 0: none is ever made."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Checkpoints of every so many steps are kept for good as well; 0: none are."""
    background: bool = True
    """Training goes on while a checkpoint is written from a copy in host memory."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a run does where something goes wrong, and how long it waits."""

    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """A gradient that is not finite: end the run, go on without that update, or go back to the last checkpoint and
    train on without the batch."""
    on_spike: Literal["ignore", "rewind"] = "ignore"
    """A loss far above those before it: nothing, or go back to the last checkpoint and train on without its
    batch and the one before."""
    spike_sigmas: float = 8.0
    """Standard deviations above the mean of the last spike_window losses from which a loss is a spike."""
    spike_window: int = 50
    """Losses that a spike is judged by."""
    max_rewinds: int = 5
    """Times that a run goes back before it ends instead."""
    start_s: float = 1800.0
    """Longest time without progress, in seconds, from the start of the ranks to the first step."""
    first_step_s: float = 1800.0
    """Longest time without progress within the first step, in which kernels are compiled and networks connect."""
    step_s: float = 600.0
    """Longest time without progress within any later step."""
    checkpoint_s: float = 1800.0
    """Longest time that writing or reading a checkpoint may take."""
    grace_s: float = 60.0
    """Time that a run which is told to stop has for its step and a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job of trigrid."""

    model: ModelSpec
    """The decoder: a name of the catalogue, a Hugging Face config, or a whole shape."""
    batch: Batch
    """How many sequences a step takes, and how long they are."""
    run: Run
    """How long, how precisely and where the job runs, and what it reports."""
    parallel: Layout = field(default_factory=Layout)
    """How the model is cut over the ranks."""
    cluster: Cluster = field(default_factory=Cluster)
    """Where the ranks sit."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW, and its learning rate over the run."""
    data: Data = field(default_factory=Data)
    """What to train on and how it is read."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """What is kept of the run."""
    faults: Faults = field(default_factory=Faults)
    """What a run does where something goes wrong."""
