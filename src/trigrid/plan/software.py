"""What the trainer does apart from the layout: what it keeps in which format, its kernels, what it overlaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

from trigrid.blueprint.terms import Kernels
from trigrid.errors import Problem, Refused
from trigrid.plan.backend import backend_of
from trigrid.spec.job import Job


@dataclass(frozen=True)
class Policy:
    """Bytes per parameter of each kind of state, and of its elements on the wire.

    compute: activations and weights in use. master: the optimizer's copy (0: the weights themselves). gather, reduce:
    weights and gradients on the wire.
    """

    name: str
    compute: int
    weights: int
    master: int
    gradients: int
    moments: int
    gather: int
    reduce: int

    @property
    def total(self) -> int:
        return self.weights + self.master + self.gradients + self.moments


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        p.name: p
        for p in (
            Policy("engine", compute=2, weights=2, master=4, gradients=4, moments=8, gather=2, reduce=4),
            Policy("engine-fp32", compute=4, weights=4, master=0, gradients=4, moments=8, gather=4, reduce=4),
            Policy("megatron", compute=2, weights=2, master=4, gradients=4, moments=8, gather=2, reduce=4),
            Policy("megatron-2021", compute=2, weights=2, master=4, gradients=2, moments=8, gather=2, reduce=2),
            Policy("megatron-half", compute=2, weights=2, master=4, gradients=4, moments=8, gather=2, reduce=2),
            Policy("deepspeed-half", compute=2, weights=2, master=4, gradients=2, moments=8, gather=2, reduce=2),
            Policy("deepspeed-bf16", compute=2, weights=2, master=4, gradients=6, moments=8, gather=2, reduce=4),
            Policy("fsdp2", compute=2, weights=2, master=4, gradients=4, moments=8, gather=2, reduce=4),
            Policy("fsdp-pure", compute=2, weights=2, master=4, gradients=4, moments=8, gather=2, reduce=2),
            Policy("pure-bf16", compute=2, weights=2, master=0, gradients=2, moments=4, gather=2, reduce=2),
            Policy("two-moments", compute=2, weights=2, master=0, gradients=2, moments=8, gather=2, reduce=2),
        )
    }
)


@dataclass(frozen=True, kw_only=True)
class Software:
    """Which trainer runs the job. Presets are in `SOFTWARE`; "trigrid" is this project's engine.

    generation: "early" (2021 to 2022, fused by hand), "deepspeed", "eager" or "fused", by which constants of launches,
        memory-bound operations are named.
    attention: kernels of fused attention, "flash1" (FlashAttention of 2022, and Triton's) or "flash2" (2023 and after).
    overlap_tp: TP collectives run beside nothing, beside the weight gradients of backward, or in pieces beside their
        products.
    overlap_dp: gradients are reduced beside the last backward. overlap_gather: weights are gathered beside the first
        forward.
    accumulate: bytes per parameter read and written to add one microbatch's gradients.
    cut_boundaries: only 1/tp of a stage boundary goes over each NIC, whether or not the sequence is cut.
    step_bytes: temporaries of the optimizer step, per parameter that a rank updates.
    expandable: the allocator's segments grow.
    traced: working sets and messages are those of this project's engine, as `trigrid prove` traces them.
    prefetched: gathered units alive beside the one in use.
    both_gradients: a unit's gradients exist in the compute format and in that of the reduction at once.
    tied_on_shards: the tied embedding is summed on shards.
    all_reduces: whole gradients are summed everywhere even where each rank then updates a shard.
    bucket_bytes: buffers of the data-parallel collectives, alive during the whole step.
    own_groups: communicators that it makes of ranks which have one already (norms, its own copies of the axes).
    frozen: patterns of parameters that are not trained, as in `optimizer.frozen`.
    blocking: the host waits for every kernel before it starts the next (CUDA_LAUNCH_BLOCKING=1).
    imbalance: load of the fullest expert rank over the mean.
    """

    name: str
    policy: Policy
    kernels: Kernels = field(default_factory=Kernels)
    generation: Literal["early", "deepspeed", "eager", "fused"] = "eager"
    attention: Literal["flash1", "flash2"] = "flash2"
    overlap_tp: Literal["none", "weights", "async"] = "none"
    overlap_dp: bool = True
    overlap_gather: bool = False
    accumulate: float = 10.0
    cut_boundaries: bool = False
    step_bytes: float = 0.0
    expandable: bool = False
    traced: bool = False
    prefetched: int = 1
    both_gradients: bool = False
    tied_on_shards: bool = False
    all_reduces: bool = False
    bucket_bytes: float = 0.0
    own_groups: int = 0
    frozen: tuple[str, ...] = ()
    blocking: bool = False
    imbalance: float = 1.0


SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {
        s.name: s
        for s in (
            Software(
                name="trigrid",
                policy=POLICIES["engine"],
                kernels=Kernels(selective="cheap", gate="again"),
                traced=True,
                prefetched=0,
                tied_on_shards=True,
            ),
            Software(
                name="megatron",
                policy=POLICIES["megatron"],
                kernels=Kernels(gate="fused", regather=True, fused_passes=True, keeps_qkv=True),
                generation="fused",
                overlap_tp="weights",
                accumulate=8.0,
                cut_boundaries=True,
                own_groups=1,
            ),
            Software(
                name="megatron-2021",
                policy=POLICIES["megatron-2021"],
                kernels=Kernels(fused_attention=False, dropout=True, fused_passes=True, regather=True, loss="unfused"),
                generation="early",
                overlap_dp=False,
                step_bytes=4.0,
                accumulate=8.0,
                cut_boundaries=True,
                own_groups=1,
            ),
            Software(
                name="megatron-2022",
                policy=POLICIES["megatron-2021"],
                kernels=Kernels(fused_attention=False, dropout=True, fused_passes=True, regather=True, loss="unfused"),
                generation="early",
                overlap_tp="weights",
                overlap_dp=False,
                step_bytes=4.0,
                accumulate=8.0,
                cut_boundaries=True,
                own_groups=1,
            ),
            Software(
                name="megatron-deepspeed",
                policy=POLICIES["deepspeed-half"],
                kernels=Kernels(fused_attention=False, dropout=True, fused_passes=True, loss="unfused"),
                generation="deepspeed",
                overlap_dp=False,
                all_reduces=True,
                bucket_bytes=2e9,
                # Megatron's for the norm; DeepSpeed's for data, model, slice and pipeline.
                own_groups=5,
                # The gradients flat in fp16, and in fp32.
                step_bytes=6.0,
                accumulate=10.0,
                cut_boundaries=True,
            ),
            Software(
                name="deepspeed",
                policy=POLICIES["deepspeed-half"],
                kernels=Kernels(fused_attention=False, fused_passes=True, dropout=True, loss="unfused"),
                generation="deepspeed",
                all_reduces=True,
                bucket_bytes=2e9,
                step_bytes=6.0,
                accumulate=6.0,
            ),
            Software(
                name="fsdp2",
                policy=POLICIES["fsdp2"],
                kernels=Kernels(selective="alternate", loss="dtensor", fused_norm=False, fused_rotary=False),
                generation="eager",
                overlap_gather=True,
                both_gradients=True,
                accumulate=0.0,
            ),
            Software(
                name="fsdp2-compiled",
                policy=POLICIES["fsdp2"],
                kernels=Kernels(gate="recomputed", fused_passes=True, selective="alternate", loss="dtensor"),
                generation="fused",
                overlap_gather=True,
                both_gradients=True,
                accumulate=0.0,
            ),
            Software(
                name="fsdp",
                policy=POLICIES["fsdp-pure"],
                kernels=Kernels(loss="in-place"),
                generation="eager",
                attention="flash1",
                overlap_gather=True,
                both_gradients=True,
                accumulate=4.0,
            ),
            Software(
                name="internevo",
                policy=POLICIES["megatron-half"],
                kernels=Kernels(gate="fused", fused_norm=False),
                generation="eager",
                attention="flash1",
                accumulate=6.0,
            ),
            Software(
                name="torchtune",
                policy=POLICIES["pure-bf16"],
                kernels=Kernels(loss="unfused", fused_norm=False, fused_rotary=False),
                generation="eager",
                accumulate=0.0,
            ),
        )
    }
)


def load_software(name: str) -> Software:
    """The preset called `name`. Raises Refused with the closest names."""
    if name not in SOFTWARE:
        closest = tuple(get_close_matches(name.lower(), SOFTWARE)) or tuple(SOFTWARE)
        raise Refused([Problem("software", name, "no software preset has this name", closest)])
    return SOFTWARE[name]


def choose_software(job: Job, name: str | None = None, policy: str | None = None, expandable: bool = False) -> Software:
    """Who trains `job`: the preset `name`, or this project's engine as the job runs it, with another precision policy
    where one is named, and with segments of the allocator that grow where `expandable`. Raises Refused with the closest
    names."""
    if name and name != "trigrid":
        found = replace(load_software(name), frozen=job.optimizer.frozen)
    else:
        found = engine_software(job)
    # What is told of a job may be said of it, also where only the job's format leads to it.
    if policy is not None and policy != found.policy.name:
        if policy not in POLICIES:
            closest = tuple(get_close_matches(policy.lower(), POLICIES)) or tuple(POLICIES)
            raise Refused([Problem("policy", policy, "no precision policy has this name", closest)])
        found = replace(found, policy=POLICIES[policy])
    return replace(found, expandable=True) if expandable else found


def engine_software(job: Job) -> Software:
    """This project's engine as the job runs it."""
    layout, run, base = job.parallel, job.run, SOFTWARE["trigrid"]
    kernels = replace(
        base.kernels,
        regather=layout.regather,
        loss="pieces" if layout.loss_chunks > 1 else "fused",
        pieces=layout.loss_chunks,
        fused_attention=not run.attention_dropout,
        documents=job.data.document_attention,
        hashed_dropout=run.dropout > 0,
        hashed_scores=run.attention_dropout > 0,
        gloo=backend_of(job) == "gloo",
    )
    base = replace(base, kernels=kernels, prefetched=layout.prefetch, frozen=job.optimizer.frozen)
    precision = run.precision
    if precision == "bf16":
        return base
    if precision == "fp32":
        return replace(base, policy=POLICIES["engine-fp32"], accumulate=4.0)
    double = Policy("engine-fp64", compute=8, weights=8, master=0, gradients=8, moments=16, gather=8, reduce=8)
    return replace(base, policy=double, accumulate=8.0)
