"""What a process holds beside what it allocates: the allocator's gaps, the context, communicators."""

from __future__ import annotations

from collections.abc import Mapping

from trigrid.plan.setup import Setup
from trigrid.plan.software import Software


class Beside:
    """Prices it for one software."""

    def __init__(self, software: Software, values: Mapping[str, float]):
        self._gaps = (values["memory.reserved_share"], values["memory.reserved_share_pipeline"])
        if software.expandable:
            self._gaps = (values["memory.reserved_share_expandable"],) * 2
        # Before CUDA 11.7 a process loaded every kernel of its libraries at once.
        early = software.generation in ("early", "deepspeed")
        self._context = values["memory.context_bytes_early" if early else "memory.context_bytes"]
        self._communicator, self._pair = values["memory.communicator_bytes"], values["memory.pair_bytes"]
        self._own_groups = software.own_groups

    def reserved(self, setup: Setup, state: float, moving: float) -> float:
        """Bytes that the caching allocator holds: state comes once and lies close, what comes and goes leaves gaps, and
        more of them where microbatches are in flight, since the oldest is freed first, from amid the others."""
        return state + moving / self._gaps[setup.pp > 1]

    def runtime_bytes(self, setup: Setup) -> float:
        """Context and communicators, which only the device sees."""
        return self._context + communicators(setup, self._own_groups) * self._communicator + pairs(setup) * self._pair


def communicators(setup: Setup, own_groups: int = 0) -> int:
    """Communicators of a rank: one for each axis that is cut, one for the world, and those that the software makes
    besides (P13: each has its own buffers)."""
    if setup.world == 1:
        return 0
    cut = (setup.tp > 1) + (setup.cp > 1) + (setup.dp > 1) + (setup.ep > 1) + (setup.dp_replicate > 1)
    return cut + 1 + own_groups


def pairs(setup: Setup) -> int:
    """Communicators of two ranks, which need no rings and trees: one for each neighbour of a pipeline and direction."""
    return 2 if setup.pp == 2 else 4 if setup.pp > 2 else 0
