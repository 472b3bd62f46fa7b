"""What a search found: candidates with their prices, the best of them, the front, and how much was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trigrid.plan.layouts import job_of
from trigrid.plan.plan import Plan, make_plan
from trigrid.plan.setup import Setup
from trigrid.plan.software import Software
from trigrid.plan.space import Space
from trigrid.spec.job import Job
from trigrid.spec.rules import check_trainable


class Candidate(NamedTuple):
    """A layout with its price; bytes of its fullest stage."""

    step_s: float
    bytes: float
    setup: Setup


@dataclass(frozen=True)
class Counts:
    """legal: distinct layouts; priced: those whose time was computed; fitting: those of them that fit and are about as
    fast as the best; replayed: of these.

    The others were left out because their bounds say that they do not fit, or are too slow.
    """

    legal: int
    priced: int
    fitting: int
    replayed: int


@dataclass(frozen=True)
class Found:
    """What a search found. ranked: replayed layouts that fit, the fastest first; front: Pareto front of memory and
    time among the priced layouts, the fastest first. proved: no layout that was not replayed can be faster. tightest:
    where nothing fits, the layout that needs least memory.
    """

    space: Space
    software: Software
    ranked: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    counts: Counts
    proved: bool
    tightest: Candidate | None = None

    @property
    def chosen(self) -> Candidate:
        """The best layout, or the one that is nearest to fitting."""
        if self.ranked:
            return self.ranked[0]
        assert self.tightest is not None
        return self.tightest

    @property
    def job(self) -> Job:
        return job_of(self.space.job, self.chosen.setup)

    @property
    def plan(self) -> Plan:
        return make_plan(self.job, self.software)

    @property
    def spare_gpus(self) -> int:
        return self.space.gpus - self.chosen.setup.world

    def trainable(self) -> Candidate | None:
        """The fastest of the replayed layouts that `trigrid train` runs."""
        return next((c for c in self.ranked if not check_trainable(job_of(self.space.job, c.setup))), None)

    def within(self, hbm_bytes: float) -> Candidate | None:
        """The fastest of the front and of the replayed layouts that needs at most `hbm_bytes`."""
        able = [c for c in (*self.ranked, *self.front) if c.bytes <= hbm_bytes]
        return min(able, key=lambda c: c.step_s) if able else None
