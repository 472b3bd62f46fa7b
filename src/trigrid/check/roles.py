"""The ranks of a job that do something of their own."""

from __future__ import annotations

from typing import NamedTuple

from trigrid.blueprint.buckets import job_buckets
from trigrid.errors import Problem, Refused
from trigrid.grid import grid_of
from trigrid.plan.scheduled import job_schedule
from trigrid.schedule.of_job import splits_backward
from trigrid.spec.job import Job


class Role(NamedTuple):
    """rank: whose program is run; pp: its place in the pipeline; alike: all places that hold the same."""

    rank: int
    pp: int
    alike: tuple[int, ...]


def roles(job: Job) -> tuple[Role, ...]:
    """One rank for each kind of pipeline rank, by the units of its stages and what they recompute: of those alike the
    first, which has most microbatches under way; where backwards are split also the last, which puts off most."""
    kinds: dict[object, list[int]] = {}
    for pp in range(job.parallel.pp):
        kinds.setdefault(_kind(job, pp), []).append(pp)
    split = splits_backward(job_schedule(job))
    shown = {pp: tuple(alike) for alike in kinds.values() for pp in {alike[0], *(alike[-1:] if split else ())}}
    return tuple(Role(_rank(job, pp), pp, shown[pp]) for pp in sorted(shown))


def chosen(job: Job, ranks: tuple[int, ...]) -> tuple[Role, ...]:
    """The roles of `ranks`. Raises Refused for those that the job lacks."""
    grid = grid_of(job)
    wrong = [rank for rank in ranks if not 0 <= rank < grid.world]
    if wrong:
        reason = f"must be from 0 to {grid.world - 1}"
        raise Refused([Problem("ranks", r, reason, (min(max(r, 0), grid.world - 1),)) for r in wrong])
    return tuple(Role(rank, grid.coord(rank).pp, (grid.coord(rank).pp,)) for rank in ranks)


def places(alike: tuple[int, ...]) -> str:
    """Numbers in words, runs as ranges: 1–14, 16."""
    runs: list[list[int]] = []
    for number in alike:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _kind(job: Job, pp: int) -> object:
    """What two pipeline ranks must have in common to be of one role."""
    _, stages = job_buckets(job, pp, 0)
    return tuple(
        (tuple((unit.unit.kind, unit.backward, len(unit.buckets)) for unit in units), job.parallel.recompute_of(stage))
        for stage, units in stages.items()
    )


def _rank(job: Job, pp: int) -> int:
    grid = grid_of(job)
    return grid.rank(grid.coord(0)._replace(pp=pp))
