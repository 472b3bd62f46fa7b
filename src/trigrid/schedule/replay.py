"""A schedule played with durations.

The model: a rank does its actions in order, each as soon as it is free and what it needs is there. A message leaves
when its action ends and its channel (one for each ordered pair of ranks) is through with the message before it; it
arrives a P2P time later, during which both ranks work on. A hand-over between stages of one rank takes no time. How
many messages may be under way is not limited here; `validate` is about that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf, isfinite
from typing import NamedTuple

from trigrid.schedule.actions import Action, Kind, Schedule

KINDS = tuple(Kind)


class Span(NamedTuple):
    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of each kind of action by stage, and of a message between stage s and s + 1, either way.

    Raises ValueError for a negative or endless time, or tuples of unequal lengths (p2p_s: one less than stages).
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    p2p_s: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            if not all(isfinite(value) and value >= 0 for value in values):
                raise ValueError(f"{field.name}: a negative or endless time in {values}")
            wanted = len(self.forward_s) - (field.name == "p2p_s")
            if len(values) != wanted:
                raise ValueError(f"{field.name}: {len(values)} times, not {wanted}")

    @classmethod
    def equal(cls, stages: int, forward_s: float, input_s: float, weight_s: float, p2p_s: float = 0.0) -> Durations:
        """The same for all stages; a whole backward takes as long as its halves."""
        return cls(
            forward_s=(forward_s,) * stages,
            backward_s=(input_s + weight_s,) * stages,
            input_s=(input_s,) * stages,
            weight_s=(weight_s,) * stages,
            p2p_s=(p2p_s,) * (stages - 1),
        )


@dataclass(frozen=True)
class Order:
    """The actions of a schedule, each behind all that it waits for, as flat tuples: made once, played often.

    Entry i is an action; `ranks` its rank, `costs` where its time stands in a table of kinds by stages, `awaits` the
    entry whose result it needs (−1: none), `links` the channel of its message (−1: none) and `edges` the stage before
    the boundary that the message crosses (−1: none).
    """

    schedule: Schedule
    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    costs: tuple[int, ...]
    awaits: tuple[int, ...]
    links: tuple[int, ...]
    edges: tuple[int, ...]

    def seconds(self, durations: Durations) -> list[float]:
        """The time of each action."""
        assert len(durations.forward_s) == self.schedule.stages
        table = (*durations.forward_s, *durations.backward_s, *durations.input_s, *durations.weight_s)
        return [table[cost] for cost in self.costs]

    def delays(self, durations: Durations) -> list[float]:
        """The time of each action's message; 0 where there is none."""
        table = (*durations.p2p_s, 0.0)
        return [table[edge] for edge in self.edges]

    def play(self, seconds: Sequence[float], delays: Sequence[float]) -> Timeline:
        """The timeline where entry i takes seconds[i] and its message delays[i]."""
        ends_s, _, starts_s = self._played(seconds, delays)
        busy_s = [0.0] * len(self.schedule.ranks)
        for rank, took in zip(self.ranks, seconds, strict=True):
            busy_s[rank] += took
        return Timeline(self, tuple(starts_s), tuple(ends_s), max(ends_s, default=0.0), tuple(busy_s))

    def times(self, seconds: Sequence[float], delays: Sequence[float]) -> tuple[list[float], list[float]]:
        """When each action ends, and when its result is where it is needed."""
        ends_s, arrivals_s, _ = self._played(seconds, delays)
        return ends_s, arrivals_s

    def _played(
        self, seconds: Sequence[float], delays: Sequence[float]
    ) -> tuple[list[float], list[float], list[float]]:
        """(ends, arrivals, starts)."""
        free_s = [0.0] * len(self.schedule.ranks)
        link_s = [0.0] * (max(self.links, default=-1) + 1)
        starts_s: list[float] = []
        ends_s: list[float] = []
        arrivals_s: list[float] = []
        for rank, needed, link, took, delay in zip(self.ranks, self.awaits, self.links, seconds, delays, strict=True):
            start = free_s[rank]
            if needed >= 0 and arrivals_s[needed] > start:
                start = arrivals_s[needed]
            free_s[rank] = end = start + took
            starts_s.append(start)
            ends_s.append(end)
            if link >= 0:
                leaves = link_s[link]
                link_s[link] = arrival = (leaves if leaves > end else end) + delay
                arrivals_s.append(arrival)
            else:
                arrivals_s.append(end)
        return ends_s, arrivals_s, starts_s


@dataclass(frozen=True)
class Timeline:
    """What a replay yields; starts_s, ends_s by entry of `order`, busy_s by rank; step_s is the end of the last action.

    bubble_ratio is idle ÷ busy time, idle_share idle ÷ step, of all ranks together or of each.
    """

    order: Order
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    step_s: float
    busy_s: tuple[float, ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """In an order in which each is behind all that it waits for, and so in its rank's order."""
        return tuple(map(Span, self.order.ranks, self.order.actions, self.starts_s, self.ends_s))

    @property
    def idle_s(self) -> tuple[float, ...]:
        return tuple(self.step_s - busy for busy in self.busy_s)

    @property
    def bubble_ratio(self) -> float:
        return _ratio(sum(self.idle_s), sum(self.busy_s))

    @property
    def idle_share(self) -> float:
        return _ratio(sum(self.idle_s), self.step_s * len(self.busy_s))

    @property
    def bubble_ratios(self) -> tuple[float, ...]:
        return tuple(map(_ratio, self.idle_s, self.busy_s))

    @property
    def idle_shares(self) -> tuple[float, ...]:
        return tuple(_ratio(idle, self.step_s) for idle in self.idle_s)


def _ratio(idle_s: float, of_s: float) -> float:
    return idle_s / of_s if of_s else (inf if idle_s else 0.0)


def replay(order: Order, durations: Durations) -> Timeline:
    """Play `order` with times by stage; with times of each action on its own, see `Order.play`."""
    return order.play(order.seconds(durations), order.delays(durations))


def order_of(schedule: Schedule) -> Order:
    """An order in which `schedule`, one that `validate` passes, can be played.

    Raises ValueError where ranks wait for each other, however many messages may be under way.
    """
    facts = _facts(schedule)
    of = {kind: facts[i * schedule.stages : (i + 1) * schedule.stages] for i, kind in enumerate(KINDS)}
    done: list[Action] = []
    costs: list[int] = []
    awaits: list[int] = []
    made = [-1] * (2 * schedule.stages * schedule.microbatches)
    waiting: dict[int, int] = {}
    left = [iter(actions) for actions in schedule.ranks]
    held: list[Action | None] = [None] * len(left)
    able = list(reversed(range(len(left))))
    while able:
        rank = able.pop()
        action = held[rank] or next(left[rank], None)
        while action is not None:
            kind, stage, m = action
            cost, needed, makes, _, _ = of[kind][stage]
            if needed < 0:
                awaits.append(-1)
            elif (entry := made[needed + m]) >= 0:
                awaits.append(entry)
            else:
                waiting[needed + m] = rank
                break
            if makes >= 0:
                made[makes + m] = len(done)
                if makes + m in waiting:
                    able.append(waiting.pop(makes + m))
            done.append(action)
            costs.append(cost)
            action = next(left[rank], None)
        held[rank] = action
    if stuck := [f"rank {rank} at {action}" for rank, action in enumerate(held) if action is not None]:
        raise ValueError(f"schedule {schedule.name}: a circle of waits, {'; '.join(stuck)}")
    return Order(
        schedule,
        actions=tuple(done),
        ranks=tuple([schedule.placement[cost % schedule.stages] for cost in costs]),
        costs=tuple(costs),
        awaits=tuple(awaits),
        links=tuple([facts[cost].link for cost in costs]),
        edges=tuple([facts[cost].edge for cost in costs]),
    )


class _Fact(NamedTuple):
    """What holds for all microbatches of a kind and stage: its entries of an Order, and the first of the results that
    it needs and makes, numbered by direction, stage and microbatch; −1 where there is none."""

    cost: int
    needed: int
    makes: int
    link: int
    edge: int


def _facts(schedule: Schedule) -> list[_Fact]:
    """By kind and stage."""
    stages, microbatches, placement = schedule.stages, schedule.microbatches, schedule.placement
    links: dict[tuple[int, int], int] = {}
    found: list[_Fact] = []
    for kind in KINDS:
        ahead = 1 if kind is Kind.FORWARD else -1
        results = 0 if kind is Kind.FORWARD else stages * microbatches
        for stage in range(stages):
            needed = makes = link = edge = -1
            if kind is not Kind.WEIGHT:
                makes = results + stage * microbatches
                if 0 <= stage - ahead < stages:
                    needed = results + (stage - ahead) * microbatches
                if 0 <= stage + ahead < stages and placement[stage] != placement[stage + ahead]:
                    link = links.setdefault((placement[stage], placement[stage + ahead]), len(links))
                    edge = min(stage, stage + ahead)
            found.append(_Fact(len(found), needed, makes, link, edge))
    return found
