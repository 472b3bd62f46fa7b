"""Every layout that a search looks at: the open knobs, the values that the rules leave to each, what goes together.

A rule joins at most the knobs that are enumerated together here: degrees with the world and the batch, schedule with
virtual stages, a ZeRO stage with its policies. So the product of what is legal for each is what is legal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, cast

from trigrid.plan.setup import Setup
from trigrid.spec.job import Job
from trigrid.spec.layout import SPLIT_BACKWARD, V_SHAPED, ScheduleName, ZeroStage, zero_policy
from trigrid.spec.rules import check, divisors

KNOBS = (
    "tp",
    "cp",
    "pp",
    "dp",
    "ep",
    "dp_replicate",
    "zero",
    "gather",
    "reduce",
    "schedule",
    "virtual_stages",
    "micro_batch",
    "recompute",
)
LINEAR: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "zb-h1")
RECOMPUTE = ("full", "selective", "none")
"""From the least memory to the most."""
FEWEST_TOKENS = 1024
"""Of a sequence that context parallelism leaves to a rank."""
LEAST_USED = 7 / 8
"""Share of the GPUs that are used by the layout which uses most: below it a layout is no candidate."""


class Degrees(NamedTuple):
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


class Sharding(NamedTuple):
    """dp_replicate: 0 stands for one copy in each group of `node` or `leaf` size; see `Space.shardings`."""

    dp_replicate: int
    zero: int
    gather_per_use: bool
    reduce_per_microbatch: bool


class Piping(NamedTuple):
    schedule: str
    virtual: int


@dataclass(frozen=True)
class Space:
    """The layouts of `job` on at most `gpus` GPUs where the knobs `open` take every legal value.

    job: sound as it is; its own values, which `base` has as plain numbers, hold for the knobs that are not open. Where
    cp is open, each rank keeps at least FEWEST_TOKENS of a sequence; where dp is open it is the largest that GPUs and
    batch allow, and layouts that use less than LEAST_USED of the best use of the GPUs are left out. dp_replicate, where
    it is open, keeps the collectives of every use inside a node or a leaf. selective: that recomputation drops anything
    that full does not.
    """

    job: Job
    open: frozenset[str]
    gpus: int
    base: Setup
    selective: bool = True

    def __post_init__(self) -> None:
        assert self.open <= set(KNOBS), self.open

    # Degrees

    @cached_property
    def grids(self) -> tuple[Degrees, ...]:
        """Degrees that go together, those that use most GPUs first."""
        found = [
            Degrees(tp, cp, pp, dp, ep)
            for tp in self.tensor()
            for cp in self._context(tp)
            for pp in self._pipeline(self.gpus // (tp * cp))
            if (dp := self.data_parallel(tp * cp * pp))
            for ep in self._experts(dp * cp)
        ]
        most = max((grid.world for grid in found), default=0)
        kept = [grid for grid in found if "dp" not in self.open or grid.world >= LEAST_USED * most]
        return tuple(sorted(kept, key=lambda grid: -grid.world))

    def tensor(self) -> list[int]:
        layout, heads = self.job.parallel, self.job.model.heads
        if "tp" not in self.open:
            return [layout.tp]
        sizes = [n for n in range(1, min(heads, self.gpus) + 1) if heads % n == 0]
        return [n for n in sizes if not check(replace(self.job, parallel=replace(layout, tp=n)))]

    def _context(self, tp: int) -> list[int]:
        layout, sequence = self.job.parallel, self.job.batch.sequence
        if "cp" not in self.open:
            return [layout.cp]
        most = min(self.gpus // tp, sequence // FEWEST_TOKENS)
        return [1, *(n for n in range(2, most + 1) if sequence % (2 * n * tp) == 0)]

    def _pipeline(self, room: int) -> list[int]:
        if "pp" not in self.open:
            return [self.job.parallel.pp] if self.job.parallel.pp <= room else []
        return [pp for pp in range(1, min(room, self.job.model.layers + 2) + 1) if self.pipings(pp)]

    def data_parallel(self, others: int) -> int:
        """The dp beside `others` = tp · cp · pp ranks; 0 where there is none."""
        room, layout, batch = self.gpus // others, self.job.parallel, self.job.batch
        if "dp" not in self.open:
            return layout.dp if layout.dp <= room else 0
        step = 1 if "micro_batch" in self.open else batch.micro_batch
        copies = 1 if "dp_replicate" in self.open else layout.dp_replicate
        ranks = batch.global_batch // step
        experts = 1 if "ep" in self.open else layout.ep
        fitting = (dp for dp in reversed(divisors(ranks)) if dp <= room and dp % copies == 0)
        return next((dp for dp in fitting if (dp * layout.cp) % experts == 0), 0)

    def _experts(self, ranks: int) -> list[int]:
        experts = self.job.model.experts
        if "ep" not in self.open or not experts:
            return [self.job.parallel.ep]
        return [n for n in range(1, min(ranks, experts.count) + 1) if ranks % n == 0 and experts.count % n == 0]

    # Policies

    def pipings(self, pp: int) -> tuple[Piping, ...]:
        """Schedules with their stages per rank, for `pp` ranks. Interleaving one stage is 1f1b, so it counts once."""
        found = self._pipings.get(pp)
        if found is None:
            found = self._pipings[pp] = tuple(self._piped(pp))
        return found

    @cached_property
    def _pipings(self) -> dict[int, tuple[Piping, ...]]:
        return {}

    def _piped(self, pp: int) -> Iterator[Piping]:
        layout, layers = self.job.parallel, self.job.model.layers
        names = (*LINEAR, "interleaved", *V_SHAPED) if "schedule" in self.open else (layout.schedule,)
        if pp == 1 and "schedule" in self.open:
            names = ("1f1b",)
        if self.job.run.compile:
            names = tuple(name for name in names if name not in SPLIT_BACKWARD)
        for name in names:
            if name in V_SHAPED:
                fitting = range(2, 3)
            elif name == "interleaved":
                fitting = range(2 if "schedule" in self.open else 1, max(1, layers // pp) + 1)
            else:
                fitting = range(1, 2)
            for virtual in fitting if "virtual_stages" in self.open else (layout.virtual_stages,):
                stages = pp * virtual
                enough = stages <= layers and pp > 1 if virtual > 1 else stages <= layers + 2
                given = len(layout.stage_layers) in (0, stages) and self._named_stages in (0, stages)
                if virtual in fitting and enough and given:
                    yield Piping(name, virtual)

    @property
    def _named_stages(self) -> int:
        """Stages of which each has its own recomputation, where all are given."""
        given = self.job.parallel.recompute
        return 0 if "recompute" in self.open or isinstance(given, str) else len(given)

    @cached_property
    def _policies(self) -> tuple[Sharding, ...]:
        """ZeRO stages with their two policies. Stage 1 reduced per microbatch is stage 2, stage 2 reduced once a step
        is stage 1, and stage 3 gathered once a step is either of them while it runs: each counts once."""
        layout, opened = self.job.parallel, self.open
        zeros = (0, 1, 2, 3) if "zero" in opened else (layout.zero,)
        gathers = ("per_step", "per_use") if "gather" in opened else (layout.gather,)
        reduces = ("per_step", "per_microbatch") if "reduce" in opened else (layout.reduce,)
        found: dict[Sharding, None] = {}
        for zero in zeros:
            for gather in gathers:
                for reduce in reduces:
                    twin = (zero, reduce) in ((1, "per_microbatch"), (2, "per_step")) or (
                        zero == 3 and gather == "per_step" and "gather" in opened
                    )
                    if twin and len(zeros) > 1:
                        continue
                    changed = replace(
                        layout,
                        zero=cast(ZeroStage, zero),
                        gather=cast(Literal["auto", "per_step", "per_use"], gather),
                        reduce=cast(Literal["auto", "per_step", "per_microbatch"], reduce),
                    )
                    if not check(replace(self.job, parallel=changed)):
                        policy = zero_policy(changed)
                        found[Sharding(1, zero, policy.gather_per_use, policy.reduce_per_microbatch)] = None
        return tuple(found)

    def shardings(self, grid: Degrees) -> tuple[Sharding, ...]:
        """Ways to shard the state over dp · cp ranks."""
        if grid.dp * grid.cp == 1:
            # Nothing is shared, so all ways are one.
            return self._policies[:1] if "zero" not in self.open else (Sharding(1, 1, False, False),)
        if "dp_replicate" not in self.open:
            return tuple(way._replace(dp_replicate=self.job.parallel.dp_replicate) for way in self._policies)
        node = self.job.cluster.gpus_per_node
        sizes = (node, node * self.job.cluster.nodes_per_leaf)
        shards = [size // (grid.world // grid.dp) for size in sizes]
        copies = [grid.dp // n for n in shards if 1 < n < grid.dp and grid.dp % n == 0]
        found = []
        for way in self._policies:
            found.append(way)
            if way.gather_per_use or way.reduce_per_microbatch:
                found += [way._replace(dp_replicate=n) for n in copies]
        return tuple(found)

    def micro_batches(self, dp: int) -> tuple[int, ...]:
        batch = self.job.batch
        if "micro_batch" not in self.open:
            return (batch.micro_batch,)
        share = batch.global_batch // dp
        found = self._divisors.get(share)
        if found is None:
            found = self._divisors[share] = divisors(share)
        return found

    @cached_property
    def _divisors(self) -> dict[int, tuple[int, ...]]:
        return {}

    @property
    def recomputes(self) -> tuple[str | tuple[str, ...], ...]:
        """From the least memory to the most."""
        if "recompute" not in self.open:
            return (self.job.parallel.recompute,)
        return RECOMPUTE if self.selective else ("full", "none")

    # Candidates

    def setup(
        self,
        grid: Degrees,
        piping: Piping,
        sharding: Sharding,
        micro_batch: int,
        recompute: str | tuple[str, ...],
    ) -> Setup:
        copies, zero, gather, reduce = sharding
        return self.base._replace(
            tp=grid.tp,
            cp=grid.cp,
            pp=grid.pp,
            dp=grid.dp,
            ep=grid.ep,
            dp_replicate=copies,
            zero=zero,
            gather_per_use=gather,
            reduce_per_microbatch=reduce,
            schedule=piping.schedule,
            virtual=piping.virtual,
            micro_batch=micro_batch,
            microbatches=self.job.batch.global_batch // (grid.dp * micro_batch),
            recompute=recompute,
        )

    def setups(self) -> Iterator[Setup]:
        """Every candidate."""
        for grid in self.grids:
            for piping in self.pipings(grid.pp):
                for sharding in self.shardings(grid):
                    for micro_batch in self.micro_batches(grid.dp):
                        for recompute in self.recomputes:
                            yield self.setup(grid, piping, sharding, micro_batch, recompute)

    def count(self) -> int:
        """How many candidates there are."""
        others = len(self.recomputes)
        return sum(
            len(self.pipings(grid.pp)) * len(self.shardings(grid)) * len(self.micro_batches(grid.dp)) * others
            for grid in self.grids
        )
