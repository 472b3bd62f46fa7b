"""A schedule: for each pipeline rank the ordered list of what it does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """INPUT and WEIGHT are the halves of BACKWARD: the gradient that the stage before waits for, and that of the
    weights, for which nobody waits (Qi 2023, section 2)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


class Action(NamedTuple):
    """What one stage does for one microbatch.

    A forward and a backward also name the message that they produce. An INPUT produces what the BACKWARD in its place
    would, so a gradient is named as a BACKWARD whichever of them made it.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """placement: pipeline rank of each stage; ranks: the actions of each pipeline rank, in order."""

    name: str
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.placement)


def result(action: Action) -> Action:
    """The name of what `action` hands to the next stage or the one before; that of a WEIGHT is its own."""
    return action._replace(kind=Kind.BACKWARD) if action.kind is Kind.INPUT else action


def needs(schedule: Schedule, action: Action) -> Action | None:
    """The name of the result of another stage that `action` starts from, or None."""
    if action.kind is Kind.WEIGHT:
        return None
    forward = action.kind is Kind.FORWARD
    source = action.stage + (-1 if forward else 1)
    if not 0 <= source < schedule.stages:
        return None
    return Action(Kind.FORWARD if forward else Kind.BACKWARD, source, action.microbatch)


def receives(schedule: Schedule, action: Action) -> Action | None:
    """The name of the message from another rank that `action` needs, or None."""
    need = needs(schedule, action)
    if need is None or schedule.placement[need.stage] == schedule.placement[action.stage]:
        return None
    return need


def sends_to(schedule: Schedule, action: Action) -> int | None:
    """The pipeline rank that needs the result of `action` as a message, or None."""
    if action.kind is Kind.WEIGHT:
        return None
    target = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    if not 0 <= target < schedule.stages or schedule.placement[target] == schedule.placement[action.stage]:
        return None
    return schedule.placement[target]


def channels(schedule: Schedule) -> dict[tuple[int, int], tuple[Action, ...]]:
    """For each ordered pair (sender, receiver) of pipeline ranks, the names of the messages in the sender's order."""
    found: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            target = sends_to(schedule, action)
            if target is not None:
                found.setdefault((rank, target), []).append(result(action))
    return {pair: tuple(messages) for pair, messages in found.items()}
