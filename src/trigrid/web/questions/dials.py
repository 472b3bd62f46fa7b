"""Which dials there are, where they stand, and the values that their sliders offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trigrid.plan.software import POLICIES, SOFTWARE
from trigrid.spec.gpu import gpus
from trigrid.spec.rules import divisors
from trigrid.web.questions.draft import Draft

Kind = Literal["choice", "whole", "number", "text"]
Group = Literal["model", "cluster", "layout", "batch", "precision", "cost"]
Offer = Callable[[Draft], Iterable[Any]]
LARGEST_TP = 64
SHORTEST, LONGEST = 512, 2**20
"""Sequences that are offered, in tokens."""
MOST_SEQUENCES = 65_536
"""Of a global batch that is offered."""


@dataclass(frozen=True)
class Dial:
    """offer: values of the slider; without it the choices of the key, or none. knob: of a search."""

    key: str
    label: str
    group: Group
    unit: str = ""
    advanced: bool = False
    offer: Offer | None = None
    knob: bool = False


def _powers(low: int, high: int) -> list[int]:
    return [2**n for n in range(low.bit_length() - 1, high.bit_length()) if low <= 2**n <= high]


def _gpus(draft: Draft) -> Iterable[int]:
    node = draft.job.cluster.gpus_per_node
    return [1, 2, 4, *(node * n for n in _powers(1, 131_072 // node))]


def _tensor(draft: Draft) -> Iterable[int]:
    most = min(draft.job.model.heads, LARGEST_TP)
    return [*_powers(1, most), *(n for n in divisors(draft.job.model.heads) if n <= most), 3, 5]


def _pipeline(draft: Draft) -> Iterable[int]:
    layers, layout = draft.job.model.layers, draft.job.parallel
    room = max(1, min(draft.gpus // (layout.tp * layout.cp), layers + 2))
    return [1, *_powers(2, room), *(n for n in divisors(layers) if n <= room), *range(2, min(room, 12) + 1)]


def _context(draft: Draft) -> Iterable[int]:
    return _powers(1, max(1, min(64, draft.job.batch.sequence // 1024)))


def _experts(draft: Draft) -> Iterable[int]:
    experts = draft.job.model.experts
    return divisors(experts.count) if experts else [1]


def _copies(draft: Draft) -> Iterable[int]:
    return divisors(draft.job.parallel.dp)


def _virtual(draft: Draft) -> Iterable[int]:
    return range(1, max(2, draft.job.model.layers // draft.job.parallel.pp) + 1)


def _sequence(draft: Draft) -> Iterable[int]:
    context = draft.job.model.context
    return [*_powers(SHORTEST, min(context, LONGEST)), context]


def _batch(draft: Draft) -> Iterable[int]:
    dp, size = draft.job.parallel.dp, draft.job.batch.micro_batch
    now = draft.job.batch.global_batch
    near = [now // 2, now - dp * size, now + dp * size, now * 2]
    return [n for n in (*_powers(1, MOST_SEQUENCES), *near) if n > 0]


def _micro(draft: Draft) -> Iterable[int]:
    return [n for n in divisors(draft.job.batch.global_batch) if n <= 64] or [1]


def _chunks(draft: Draft) -> Iterable[int]:
    return _powers(1, 64)


DIALS = (
    Dial("gpus", "GPUs", "cluster", offer=_gpus),
    Dial("cluster.gpu", "Accelerator", "cluster", offer=lambda _: list(gpus())),
    Dial("cluster.gpus_per_node", "GPUs per node", "cluster", "GPUs", offer=lambda _: [1, 2, 4, 8, 16, 32, 64, 72]),
    Dial("cluster.nodes_per_leaf", "Nodes per leaf switch", "cluster", "nodes", True, lambda _: _powers(1, 256)),
    Dial("cluster.nvlink_gb_s", "NVLink, one way", "cluster", "GB/s", True),
    Dial("cluster.nic_gbit", "NIC of a GPU, one way", "cluster", "Gb/s", True),
    Dial("cluster.oversubscription", "Spine oversubscription", "cluster", "×", True),
    Dial("parallel.tp", "Tensor parallel (TP)", "layout", offer=_tensor, knob=True),
    Dial("parallel.pp", "Pipeline parallel (PP)", "layout", offer=_pipeline, knob=True),
    Dial("parallel.cp", "Context parallel (CP)", "layout", offer=_context, knob=True),
    Dial("parallel.ep", "Expert parallel (EP)", "layout", offer=_experts, knob=True),
    Dial("parallel.zero", "ZeRO stage", "layout", knob=True),
    Dial("parallel.schedule", "Pipeline schedule", "layout", knob=True),
    Dial("parallel.virtual_stages", "Virtual stages", "layout", "per rank", offer=_virtual, knob=True),
    Dial("parallel.recompute", "Recomputation", "layout", knob=True),
    Dial("parallel.dp_replicate", "Copies of the shards (HSDP)", "layout", "", True, _copies, True),
    Dial("parallel.gather", "Weights gathered", "layout", "", True, knob=True),
    Dial("parallel.reduce", "Gradients reduced", "layout", "", True, knob=True),
    Dial("parallel.sequence_parallel", "Sequence parallelism", "layout", "", True, lambda _: [True, False]),
    Dial("parallel.regather", "Gather inputs again", "layout", "", True, lambda _: [False, True]),
    Dial("parallel.loss_chunks", "Pieces of the loss", "layout", "", True, _chunks),
    Dial("parallel.prefetch", "Units gathered ahead", "layout", "units", True, lambda _: range(5)),
    Dial("batch.sequence", "Sequence", "batch", "tokens", offer=_sequence),
    Dial("batch.global_batch", "Global batch", "batch", "sequences", offer=_batch),
    Dial("batch.micro_batch", "Micro-batch", "batch", "sequences", offer=_micro, knob=True),
    Dial("run.precision", "Precision", "precision", "", True),
    Dial("policy", "Bytes per parameter", "precision", "", True, lambda _: list(POLICIES)),
    Dial("software", "Software", "precision", "", True, lambda _: list(SOFTWARE)),
    Dial("expandable_segments", "Allocator: expandable segments", "precision", "", True, lambda _: [False, True]),
    Dial("tokens", "Tokens to train on", "cost"),
    Dial("cluster.price", "Price of a GPU-hour", "cost", "in any currency", True),
    Dial("cluster.power_w", "Power of a GPU", "cost", "W", True),
    Dial("cluster.pue", "PUE", "cost", "building ÷ servers", True),
)
