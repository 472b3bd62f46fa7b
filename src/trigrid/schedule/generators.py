"""The named schedules, each a program of phases per rank (programs.py) that is written out here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from trigrid.schedule.actions import Action, Kind, Schedule
from trigrid.schedule.programs import PROGRAMS, Phase, Size

NAMES = tuple(PROGRAMS)


def make_schedule(name: str, pp: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """The schedule `name` (one of NAMES) over `pp` ranks of `virtual_stages` stages each.

    virtual_stages: any number for interleaved; for the others what they have, as when left out: 2 in zbv and
    dualpipev, else 1.
    Raises KeyError for an unknown name, ValueError for a size that the schedule cannot have.
    """
    chunks = virtual_stages if virtual_stages is not None else PROGRAMS[name].chunks or 1
    _check_size(name, pp, microbatches, chunks)
    ranks = tuple(rank_actions(name, pp, microbatches, chunks, rank) for rank in range(pp))
    return Schedule(name, microbatches, _placement(name, pp, chunks), ranks)


def rank_actions(name: str, pp: int, microbatches: int, virtual_stages: int, rank: int) -> tuple[Action, ...]:
    """The actions of one rank of `make_schedule`'s schedule, which is as much as what the rank holds depends on.

    Raises as `make_schedule` does.
    """
    program = PROGRAMS[name]
    _check_size(name, pp, microbatches, virtual_stages)
    enough = max(microbatches, 2 * pp - 1) if program.v_shaped else -(-microbatches // pp) * pp
    phases = program.phases(rank, Size(pp, enough, virtual_stages))
    stages = [stage for stage, holder in enumerate(_placement(name, pp, virtual_stages)) if holder == rank]
    return _written(phases, stages, pp, microbatches)


def _check_size(name: str, pp: int, microbatches: int, chunks: int) -> None:
    if min(pp, microbatches, chunks) < 1:
        raise ValueError(f"schedule {name}: ranks, microbatches and stages per rank are at least 1")
    if PROGRAMS[name].chunks not in (None, chunks):
        raise ValueError(f"schedule {name}: {PROGRAMS[name].chunks} stages per rank, not {chunks}")


def _placement(name: str, pp: int, chunks: int) -> tuple[int, ...]:
    return (*range(pp), *reversed(range(pp))) if PROGRAMS[name].v_shaped else tuple(range(pp)) * chunks


def forward_only(pp: int, microbatches: int, placement: tuple[int, ...] | None = None) -> Schedule:
    """All forwards, no backward: the schedule of validation.

    placement: pipeline rank of each stage; left out, one stage per rank. A microbatch enters whenever the fullest
    rank can be through with the one before, and every rank acts in the order of the times that follow from it.
    """
    placement = placement or tuple(range(pp))
    every = max(placement.count(rank) for rank in range(pp))
    due = sorted((stage + every * m, stage, m) for stage in range(len(placement)) for m in range(microbatches))
    ranks: list[list[Action]] = [[] for _ in range(pp)]
    for _, stage, m in due:
        ranks[placement[stage]].append(Action(Kind.FORWARD, stage, m))
    return Schedule("forward", microbatches, placement, tuple(map(tuple, ranks)))


def _written(phases: Sequence[Phase], stages: Sequence[int], group: int, microbatches: int) -> tuple[Action, ...]:
    """The actions of `phases` on a rank that holds `stages`, without those of microbatch `microbatches` and later.

    What is left out is all of a microbatch on every rank, so no order among forwards and input backwards changes;
    weights move up into the places of those left out.
    """
    unweighted: deque[Action] = deque()
    places = {"F": _in_groups(stages, group), "B": _in_groups(stages[::-1], group)}
    for chunk, stage in enumerate(stages):
        places[f"F{chunk}"] = _in_groups([stage], group)
        places[f"B{chunk}"] = places[f"I{chunk}"] = _in_groups([stage], group)
    written: list[Action] = []
    for times, text in phases:
        words = [(Kind(word[0]), places.get(word)) for word in text.split()]
        for _ in range(times):
            for kind, queue in words:
                if queue is None:
                    if unweighted:
                        written.append(unweighted.popleft())
                    continue
                stage, m = next(queue)
                if m < microbatches:
                    written.append(Action(kind, stage, m))
                    if kind is Kind.INPUT:
                        unweighted.append(Action(Kind.WEIGHT, stage, m))
    return tuple(written)


def _in_groups(stages: Sequence[int], group: int) -> Iterator[tuple[int, int]]:
    """(stage, microbatch) without end: `group` microbatches through each stage, then the next ones."""
    for first in count(step=group):
        for stage in stages:
            for m in range(first, first + group):
                yield stage, m
