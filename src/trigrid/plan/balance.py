"""Layers of each pipeline stage so that the slowest stage is as fast as it can be, within the accelerator's memory.

Stages are runs of consecutive layers; the first also has the embedding, the last the head, and these two alone may
have no layer. Exact dynamic programming over (stage, layers placed) finds the least possible time of the slowest stage,
and a second pass, among all splits that reach it, the one with the least sum of squares, so that no other stage is
slower than it must be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from trigrid.blueprint import split_layers
from trigrid.errors import Problem, Refused
from trigrid.plan.auto import named_job
from trigrid.plan.plan import setup_of
from trigrid.plan.setup import Setup
from trigrid.plan.software import Software
from trigrid.plan.stages import step_of
from trigrid.plan.step import Step
from trigrid.spec.job import Job

Cost = Callable[[int, int, int], float]
"""(stage, first layer, number of layers) → seconds, inf where it does not fit; no less for more layers."""


@dataclass(frozen=True)
class Balance:
    """job: with stage_layers; before: as it was. slowest_s, before_s: of the slowest stage, for one microbatch.

    proved: whether no split within the memory has a faster slowest stage. With several stages on a rank their memory is
    joint: where the fastest split is too large, each stage may only have as much as if all of its rank were like it.
    """

    job: Job
    before: tuple[int, ...]
    before_s: float
    slowest_s: float
    proved: bool


def balanced_split(stages: int, layers: int, cost: Cost) -> tuple[int, ...] | None:
    """The layers of each stage; None where nothing fits, or there are fewer layers than stages between the ends."""
    slowest = _table(stages, layers, cost, max)
    limit = slowest[-1][layers][0]
    if limit == inf:
        return None

    def within(stage: int, first: int, count: int) -> float:
        took = cost(stage, first, count)
        return took * took if took <= limit else inf

    table = _table(stages, layers, within, float.__add__)
    counts, left = [], layers
    for stage in reversed(range(stages)):
        count = table[stage][left][1]
        counts.append(count)
        left -= count
    return tuple(reversed(counts))


def _table(
    stages: int, layers: int, cost: Cost, join: Callable[[float, float], float]
) -> list[list[tuple[float, int]]]:
    """By stage and layers placed up to its end: the least joined cost of the stages so far, and the stage's layers."""
    table: list[list[tuple[float, int]]] = []
    for stage in range(stages):
        row: list[tuple[float, int]] = []
        for end in range(layers + 1):
            best, chosen = inf, 0
            fewest = 0 if stage in (0, stages - 1) else 1
            for count in range(fewest, end + 1) if stage else (end,):
                before = table[-1][end - count][0] if stage else 0.0
                own = cost(stage, end - count, count)
                if own >= best and stage:
                    break  # More layers only take longer.
                if before < inf and (joined := join(before, own)) < best:
                    best, chosen = joined, count
            row.append((best, chosen))
        table.append(row)
    return table


def balanced_job(job: Job, software: Software | None = None) -> Balance:
    """`job` with the best split of its layers in the planner's times. Raises Refused where none fits the memory."""
    planned = named_job(job)
    step = step_of(planned, software)
    setup, layers = setup_of(planned, step.software), job.model.layers
    stages = setup.pp * setup.virtual
    before = setup.layers_of(layers)
    before_s = _slowest_s(step, setup, before)
    if setup.pp == 1:
        return Balance(job, before, before_s, before_s, True)
    prices = _Prices(step, setup)
    found = balanced_split(stages, layers, prices.cost)
    proved = found is not None
    if found is not None and setup.virtual > 1 and not prices.fits(found):
        proved, found = False, balanced_split(stages, layers, prices.cautious)
        found = found if found and prices.fits(found) else None
    if found is None:
        legal = (f"{layers} layers on fewer stages",) if stages > layers + 2 else ()
        raise Refused([Problem("parallel.stage_layers", "balance", "no split fits the accelerator's memory", legal)])
    split = () if found == split_layers(layers, stages) else found
    layout = replace(job.parallel, stage_layers=split)
    return Balance(replace(job, parallel=layout), before, before_s, _slowest_s(step, setup, found), proved)


def _slowest_s(step: Step, setup: Setup, split: tuple[int, ...]) -> float:
    return max(chunk.total_s for chunk in step.pipeline(setup._replace(stage_layers=split)).stages)


class _Prices:
    """What a stage of some layers takes and whether it fits; each kind of stage is asked for once."""

    def __init__(self, step: Step, setup: Setup) -> None:
        self.step, self.setup = step, setup
        self.layers, self.stages = step.spec.layers, setup.pp * setup.virtual
        self.ceiling = step.machine.gpu.hbm_bytes
        self._seconds: dict[tuple[object, ...], float] = {}
        self._fitting: dict[tuple[object, ...], bool] = {}

    def cost(self, stage: int, first: int, count: int) -> float:
        """Seconds of the stage; with one stage on each rank, inf where that rank's memory is too small."""
        return self._priced(stage, first, count, (stage,) if self.setup.virtual == 1 else ())

    def cautious(self, stage: int, first: int, count: int) -> float:
        """Seconds of the stage; inf where its rank could not hold as many stages of this size as it has stages."""
        holder = self.setup.holder
        return self._priced(stage, first, count, tuple(s for s in range(self.stages) if holder(s) == holder(stage)))

    def fits(self, split: tuple[int, ...]) -> bool:
        """Whether every rank holds its stages of `split`."""
        setup = self.setup._replace(stage_layers=split)
        return all(self._bytes(setup, rank) <= self.ceiling for rank in range(setup.pp))

    def _priced(self, stage: int, first: int, count: int, alike: tuple[int, ...]) -> float:
        """alike: the stages that are to be as large as this one, and whose rank must hold them all."""
        after = self.layers - first - count
        if first < stage - 1 or (after < self.stages - 2 - stage):
            return inf  # Those before or after it would have nothing.
        units = tuple(self.step.memory.kinds(first, count))
        if alike:
            key = (stage, units, len(alike))
            if key not in self._fitting:
                split = self._around(first, stage, dict.fromkeys(alike, count))
                rank = self.setup.holder(stage)
                setup = self.setup._replace(stage_layers=split)
                self._fitting[key] = bool(split) and self._bytes(setup, rank) <= self.ceiling
            if not self._fitting[key]:
                return inf
        place = (stage == 0, stage == self.stages - 1, self.setup.at(stage).recompute, units)
        if place not in self._seconds:
            split = self._around(first, stage, {stage: count})
            setup = self.setup._replace(stage_layers=split)
            self._seconds[place] = self.step.pipeline(setup).stages[stage].total_s if split else inf
        return self._seconds[place]

    def _around(self, first: int, stage: int, placed: dict[int, int]) -> tuple[int, ...]:
        """A split in which `stage` begins with layer `first` where that is possible, and `placed` have their layers;
        () where the others, each at least one, are too many."""
        split = [placed.get(s, int(0 < s < self.stages - 1)) for s in range(self.stages)]
        if stage and 0 not in placed:
            split[0] = max(0, first - sum(split[1:stage]))
        spare = self.layers - sum(split)
        others = [s for s in range(self.stages) if s not in placed and s > stage] or [0]
        split[others[-1]] += spare
        return tuple(split) if spare >= 0 and (not spare or others[-1] not in placed) else ()

    def _bytes(self, setup: Setup, rank: int) -> float:
        return self.step.memory.device_bytes(setup, self.step.memory.use(setup, rank, exact=True))
