"""`catalogue`: what a state may name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from trigrid.plan.software import POLICIES, SOFTWARE, Policy
from trigrid.report.plan import policy_text
from trigrid.spec.gpu import GIB, gpus
from trigrid.spec.models import catalogue as models
from trigrid.web.questions.shapes import shape
from trigrid.web.questions.state import State

FIRST = State(
    model="llama3-405b",
    gpus=1024,
    tokens="15T",
    values={
        "parallel.tp": 8,
        "parallel.pp": 16,
        "parallel.zero": 1,
        "parallel.schedule": "1f1b",
        "parallel.recompute": "full",
        "batch.sequence": 8192,
        "batch.global_batch": 512,
    },
)
"""What a page opens with."""


@dataclass(frozen=True, kw_only=True)
class CatalogueInput:
    """Nothing is needed."""


@dataclass(frozen=True, slots=True)
class Model:
    """A published shape."""

    name: str
    """As a state names it."""
    family: str
    """Its first word."""
    parameters: int
    """Exact count."""
    words: str
    """Its shape in a sentence."""
    source: str
    """Where its numbers are from."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An accelerator."""

    name: str
    """As a state names it."""
    hbm_bytes: int
    """What a process can allocate."""
    nvlink_domain: int
    """GPUs of the usual server."""
    words: str
    """Its numbers in a sentence."""
    source: str
    """Where they are from."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """Software that trains."""

    name: str
    """As a state names it."""
    policy: str
    """Its own precision policy."""


@dataclass(frozen=True, slots=True)
class PolicyBytes:
    """Bytes of state per parameter."""

    name: str
    """As a state names it."""
    weights: int
    """In use."""
    master: int
    """The optimizer's copy."""
    gradients: int
    """As they are kept."""
    moments: int
    """Both of them."""
    total: int
    """Their sum."""
    words: str
    """The same in a sentence."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All names."""

    models: list[Model]
    """By family."""
    gpus: list[Accelerator]
    """Accelerators."""
    software: list[Trainer]
    """Who may train."""
    policies: list[PolicyBytes]
    """Bytes per parameter."""
    default: State
    """The state that a page opens with."""
    run: str | None = None
    """The run that this server shows besides; null: none."""


@cache
def _catalogue() -> Catalogue:
    return Catalogue(
        models=[
            Model(name, name.split("-")[0], entry.parameters, shape(entry.spec).words, entry.source)
            for name, entry in models().items()
        ],
        gpus=[
            Accelerator(
                gpu.name,
                gpu.hbm_bytes,
                gpu.nvlink_domain,
                f"{gpu.hbm_bytes / GIB:.1f} GiB, "
                f"{gpu.peak_flops['bf16' if 'bf16' in gpu.peak_flops else 'fp16'] / 1e12:,.0f} TFLOP/s dense, "
                f"NVLink {gpu.nvlink_Bps / 1e9:,.0f} GB/s and NIC {gpu.nic_Bps * 8 / 1e9:,.0f} Gb/s one way",
                gpu.source,
            )
            for gpu in gpus().values()
        ],
        software=[Trainer(one.name, one.policy.name) for one in SOFTWARE.values()],
        policies=[policy_bytes(policy) for policy in POLICIES.values()],
        default=FIRST,
    )


def policy_bytes(policy: Policy) -> PolicyBytes:
    """The bytes of a precision policy."""
    sizes = (policy.weights, policy.master, policy.gradients, policy.moments)
    return PolicyBytes(policy.name, *sizes, policy.total, policy_text(policy))


def catalogue(_: CatalogueInput) -> Catalogue:
    """What a state may name."""
    return _catalogue()
