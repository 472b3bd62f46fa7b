"""A schedule: for each pipeline rank the ordered list of what it does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """The forward or backward of one stage on one microbatch; also names the message that it produces."""

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


def receives(schedule: Schedule, action: Action) -> Action | None:
    """The action of another rank whose result `action` needs as a message, or None."""
    source = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
    if not 0 <= source < schedule.stages or schedule.placement[source] == schedule.placement[action.stage]:
        return None
    return action._replace(stage=source)


def sends_to(schedule: Schedule, action: Action) -> int | None:
    """The pipeline rank that needs the result of `action` as a message, or None."""
    target = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    if not 0 <= target < schedule.stages or schedule.placement[target] == schedule.placement[action.stage]:
        return None
    return schedule.placement[target]


def channels(schedule: Schedule) -> dict[tuple[int, int], tuple[Action, ...]]:
    """For each ordered pair (sender, receiver) of pipeline ranks, the messages in the sender's order."""
    found: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            target = sends_to(schedule, action)
            if target is not None:
                found.setdefault((rank, target), []).append(action)
    return {pair: tuple(messages) for pair, messages in found.items()}
