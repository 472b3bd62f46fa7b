"""Single moves of a dial: which are legal, and why not.

A value is legal where the whole job is, all other knobs as they are but for those that it takes along (`also`), and dp
solved anew from the GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trigrid.spec.gpu import gpus
from trigrid.spec.job import Job
from trigrid.spec.layout import V_SHAPED
from trigrid.spec.rules import check_value
from trigrid.web.questions.draft import Draft, broken, changed, with_dp

ALONE = frozenset(
    {
        *("cluster.gpu", "cluster.gpus_per_node", "cluster.nodes_per_leaf"),
        *("run.precision", "parallel.prefetch", "parallel.recompute"),
    }
)
"""Keys whose single values no rule joins with others."""
BESIDE_DP = frozenset(
    {
        *("parallel.zero", "parallel.gather", "parallel.reduce", "parallel.schedule", "parallel.virtual_stages"),
        *("parallel.sequence_parallel", "parallel.regather", "parallel.loss_chunks", "batch.sequence"),
    }
)
"""Keys that leave dp as it is."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of a dial."""

    value: str | int | float | bool
    """The value."""
    legal: bool
    """Whether the job would be sound with it."""
    reason: str
    """Why not."""
    also: dict[str, str | int]
    """Other keys that must be set with it."""


class Moves:
    """Jobs one move away from a draft's."""

    def __init__(self, draft: Draft):
        self.draft, self.job = draft, draft.job
        self._here = self._reason(self.job, draft.gpus)

    def choice(self, key: str, value: Any) -> Choice:
        """`value` under `key`, and whether that is legal."""
        also = self._also(key, value)
        if alone := check_value(key, value):
            return Choice(value, False, alone[0].reason, also)
        if key in ALONE or (not also and value == get(self.job, key)):
            return self.alone(value, also)
        moved = self.job
        for name, other in {key: value, **also}.items():
            moved = put(moved, name, other)
        if key not in BESIDE_DP and not self.draft.given_dp:
            moved = with_dp(moved, self.draft.gpus)
        reason = self._reason(moved, self.draft.gpus)
        return Choice(value, not reason, reason, also)

    def alone(self, value: Any, also: dict[str, str | int] | None = None) -> Choice:
        """A value that changes nothing, or that no rule joins with others."""
        return Choice(value, not self._here, self._here, also or {})

    def gpus(self, count: int) -> Choice:
        """Another number of GPUs."""
        moved = self.job if self.draft.given_dp else with_dp(self.job, count)
        reason = self._reason(moved, count)
        return Choice(count, not reason, reason, {})

    def _reason(self, job: Job, count: int) -> str:
        """Why `job` is not legal on `count` GPUs; empty where it is."""
        found = broken(job, count)
        return f"{found[0].key} = {found[0].value}: {found[0].reason}" if found else ""

    def _also(self, key: str, value: Any) -> dict[str, str | int]:
        """What a knob takes along, so that each legal layout is reached by single moves."""
        layout = self.job.parallel
        found: dict[str, str | int] = {}
        match key:
            case "parallel.schedule":
                virtual = 2 if value in V_SHAPED else max(2, layout.virtual_stages) if value == "interleaved" else 1
                if value == "auto":
                    virtual = layout.virtual_stages
                if virtual != layout.virtual_stages:
                    found["parallel.virtual_stages"] = virtual
            case "parallel.virtual_stages":
                if value > 1 and layout.schedule not in ("interleaved", "auto", *V_SHAPED):
                    found["parallel.schedule"] = "interleaved"
                elif value != 2 and layout.schedule in V_SHAPED:
                    found["parallel.schedule"] = "1f1b" if value == 1 else "interleaved"
            case "parallel.pp":
                if value == 1 and layout.virtual_stages > 1:
                    found |= {"parallel.virtual_stages": 1, "parallel.schedule": "1f1b"}
            case "parallel.zero":
                if value != 3 and layout.gather == "per_use":
                    found["parallel.gather"] = "auto"
                if value == 0 and layout.reduce == "per_microbatch":
                    found["parallel.reduce"] = "auto"
            case "cluster.gpu":
                node = gpus()[value].nvlink_domain if value in gpus() else 0
                here = gpus().get(self.job.cluster.gpu)
                # Whoever names an accelerator means the server that it comes in.
                if here and node and self.job.cluster.gpus_per_node == here.nvlink_domain != node:
                    found["cluster.gpus_per_node"] = node
        return found


def get(job: Job, key: str) -> Any:
    """The value of a job key of a section."""
    table, name = key.split(".")
    return getattr(getattr(job, table), name)


def put(job: Job, key: str, value: Any) -> Job:
    """`job` with another value of a job key of a section."""
    table, name = key.split(".")
    return changed(job, table, changed(getattr(job, table), name, value))
