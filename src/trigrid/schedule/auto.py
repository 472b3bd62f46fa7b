"""A schedule made for given times: list scheduling under many policies, the best one improved by exchanges.

Each policy plays the pipeline forward in time; a rank that is free takes, of what it could start now, what the policy
puts first, and gradients of weights where nothing else is ready (the zero-bubble idea of Qi 2023, for any times). The
named schedules are candidates as well. Neighbours on the critical path of the best are exchanged as long as that
shortens the step. The effort is bounded by counted work, so that equal questions have equal answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from trigrid.schedule.actions import Action, Kind, Schedule
from trigrid.schedule.exchange import improved, sound
from trigrid.schedule.generators import NAMES, make_schedule
from trigrid.schedule.limits import Limits, lower_bound
from trigrid.schedule.listing import Policy, Work, listed
from trigrid.schedule.replay import Durations, order_of, replay

LISTED_ACTIONS = 250_000
"""Actions placed over all policies together, at most; of policies, in the order below, no more are tried."""
IMPROVED = 2
"""Candidates that are improved."""


@dataclass(frozen=True)
class Auto:
    """schedule: called "auto"; step_s: of it; bound_s: what no schedule can beat; named, named_s: the fastest named
    schedule over the same stages and within the same limits, None and inf where there is none."""

    schedule: Schedule
    step_s: float
    bound_s: float
    named: str | None
    named_s: float

    @property
    def gap(self) -> float:
        """How far the step is above the bound, as a share of the bound."""
        return self.step_s / self.bound_s - 1 if self.bound_s else 0.0


class _Candidate(NamedTuple):
    """held: what all ranks together hold at their fullest."""

    step_s: float
    held: float
    schedule: Schedule

    @property
    def key(self) -> tuple[float, float]:
        """Of the best the smallest: what takes as long, but for rounding, is better the less it holds."""
        return float(f"{self.step_s:.9e}"), self.held


def auto_schedule(
    durations: Durations,
    microbatches: int,
    placement: Sequence[int],
    limits: Limits | None = None,
    *,
    split: bool = True,
) -> Auto:
    """The best schedule found for stages with these times on the ranks of `placement`, one that `validate` passes.

    limits: by default none. split: whether backwards may be in two halves.
    Raises ValueError where not even one microbatch at a time is within the limits.
    """
    placement = tuple(placement)
    stages, ranks = len(placement), max(placement) + 1
    limits = limits or Limits.chunks(stages, (float("inf"),) * ranks)
    work = Work(durations, microbatches, placement, limits, split)
    named = sorted(_named(work), key=lambda candidate: candidate.key)
    candidates = sorted([*named, *_listed(work)], key=lambda candidate: candidate.key)
    bound = lower_bound(durations, placement, microbatches, limits)
    found: list[_Candidate] = []
    for candidate in _distinct(candidates):
        if len(found) == IMPROVED or (found and found[0].step_s <= bound):
            break
        if not sound(candidate.schedule):
            continue
        found += _candidate(improved(candidate.schedule, work, candidate.step_s, bound), work)
    if not found:
        raise ValueError("auto: the limits leave no room for one microbatch at a time")
    best = min(found, key=lambda candidate: candidate.key)
    return Auto(
        replace(best.schedule, name="auto"),
        best.step_s,
        # Two ways to sum the same times may differ in the last bit.
        min(bound, best.step_s),
        named[0].schedule.name if named else None,
        max(named[0].step_s, best.step_s) if named else float("inf"),
    )


def _named(work: Work) -> Iterator[_Candidate]:
    ranks = len(work.limits.most_bytes)
    for name in NAMES:
        try:
            schedule = make_schedule(name, ranks, work.microbatches, len(work.placement) // ranks)
        except ValueError:
            continue
        splits = any(action.kind is Kind.INPUT for actions in schedule.ranks for action in actions)
        if schedule.placement == work.placement and (work.split or not splits):
            yield from _candidate(schedule, work)


def _listed(work: Work) -> Iterator[_Candidate]:
    """The schedule of each policy that gets to the end, as long as the effort lasts."""
    effort = 0
    for policy in _policies(work):
        ranks = listed(work, policy)
        effort += 3 * work.microbatches * len(work.placement)
        if ranks is not None:
            yield from _candidate(Schedule("listed", work.microbatches, work.placement, ranks), work)
        if effort > LISTED_ACTIONS:
            return


def _policies(work: Work) -> Iterator[Policy]:
    """The most promising first."""
    ranks = len(work.limits.most_bytes)
    most, m = work.limits.most_bytes, work.microbatches
    chunks = [[s for s, holder in enumerate(work.placement) if holder == rank] for rank in range(ranks)]
    sizes = list(map(max, work.limits.forward_bytes, work.limits.weight_bytes))
    whole = [sum(sizes[s] for s in mine) for mine in chunks]
    rooms: list[tuple[float, ...]] = []
    for room in (
        [ranks] * ranks,
        [m] * ranks,
        [ranks - rank + 1 for rank in range(ranks)],
        [2 * ranks - rank for rank in range(ranks)],
        [ranks - rank for rank in range(ranks)],
        [ranks - rank + 2 for rank in range(ranks)],
        [2 * ranks] * ranks,
        [(3 * ranks + 1) // 2] * ranks,
    ):
        caps = tuple(min(most[rank], room[rank] * whole[rank]) for rank in range(ranks))
        if caps not in rooms:
            rooms.append(caps)
    orders = [(True, True)] if len(work.placement) == ranks else list(product((True, False), repeat=2))
    ways = [(True, None), (False, None), (True, 1), (True, 0)] if work.split else [(False, None)]
    for (split, lag), patience, forwards in product(ways, (0.0, 0.5, 1.0), (False, True)):
        for (deep, back_deep), caps in product(orders, rooms):
            yield Policy(caps, forwards, deep, back_deep, patience, lag, split)


def _distinct(candidates: Iterable[_Candidate]) -> Iterator[_Candidate]:
    seen: set[tuple[tuple[Action, ...], ...]] = set()
    for candidate in candidates:
        if candidate.schedule.ranks not in seen:
            seen.add(candidate.schedule.ranks)
            yield candidate


def _candidate(schedule: Schedule, work: Work) -> list[_Candidate]:
    """`schedule` with what it takes; none where it is beyond the limits."""
    peaks = work.limits.peaks(schedule)
    if peaks is None:
        return []
    return [_Candidate(replay(order_of(schedule), work.durations).step_s, sum(peaks), schedule)]
