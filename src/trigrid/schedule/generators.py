"""The named schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trigrid.schedule.actions import Action, Kind, Schedule


def make_schedule(name: str, pp: int, microbatches: int) -> Schedule:
    """The schedule `name` for `pp` stages, one per pipeline rank."""
    generate = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}[name]
    ranks = tuple(tuple(generate(rank, pp, microbatches)) for rank in range(pp))
    return Schedule(name, microbatches, tuple(range(pp)), ranks)


def forward_only(pp: int, microbatches: int) -> Schedule:
    """All forwards, no backward: the schedule of validation."""
    ranks = tuple(tuple(_each(Kind.FORWARD, rank, range(microbatches))) for rank in range(pp))
    return Schedule("forward", microbatches, tuple(range(pp)), ranks)


def _each(kind: Kind, stage: int, microbatches: Iterable[int]) -> Iterator[Action]:
    return (Action(kind, stage, m) for m in microbatches)


def _gpipe(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards in the same order (Huang 2019)."""
    del pp
    yield from _each(Kind.FORWARD, rank, range(microbatches))
    yield from _each(Kind.BACKWARD, rank, range(microbatches))


def _one_forward_one_backward(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """A warm-up of pp − rank − 1 forwards, then a forward and a backward in turn (PipeDream-flush, Narayanan 2021)."""
    warm_up = min(pp - rank - 1, microbatches)
    yield from _each(Kind.FORWARD, rank, range(warm_up))
    for m in range(warm_up, microbatches):
        yield Action(Kind.FORWARD, rank, m)
        yield Action(Kind.BACKWARD, rank, m - warm_up)
    yield from _each(Kind.BACKWARD, rank, range(microbatches - warm_up, microbatches))
