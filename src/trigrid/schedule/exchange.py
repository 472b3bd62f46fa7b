"""Local search on a schedule: neighbours on its critical path are exchanged as long as the step gets shorter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trigrid.schedule.actions import Action, Kind, Schedule
from trigrid.schedule.listing import Work
from trigrid.schedule.replay import Order, Timeline, order_of, replay
from trigrid.schedule.validate import validate

PLAYED_ACTIONS = 300_000
"""Actions replayed at most."""
FARTHEST = 6
"""Places that an action is moved ahead at once, at most."""


def improved(schedule: Schedule, work: Work, step_s: float, bound_s: float) -> Schedule:
    """`schedule`, which takes step_s, or a faster one of the same work that `validate` passes and its limits allow."""
    effort, size = 0, sum(map(len, schedule.ranks))
    tried: set[tuple[int, Action, int]] = set()
    timeline = replay(order_of(schedule), work.durations)
    moved = True
    while moved and step_s > bound_s:
        moved = False
        for rank, at, to in _moves(timeline):
            action = schedule.ranks[rank][at]
            if (rank, action, to) in tried:
                continue
            if effort > PLAYED_ACTIONS:
                return schedule
            tried.add((rank, action, to))
            line = list(schedule.ranks[rank])
            line.insert(to, line.pop(at))
            changed = replace(schedule, ranks=(*schedule.ranks[:rank], tuple(line), *schedule.ranks[rank + 1 :]))
            effort += size
            try:
                other = replay(order_of(changed), work.durations)
            except ValueError:
                continue
            if other.step_s < step_s * (1 - 1e-12) and work.limits.allow(changed) and sound(changed):
                schedule, timeline, step_s, moved = changed, other, other.step_s, True
                tried.clear()
                break
    return schedule


def sound(schedule: Schedule) -> bool:
    """Whether it runs without waiting in a circle, over channels that are rendezvous."""
    try:
        validate(schedule)
    except ValueError:
        return False
    return True


def _moves(timeline: Timeline) -> Iterator[tuple[int, int, int]]:
    """(rank, place, earlier place): an action of the critical path put ahead of what runs right before it."""
    order = timeline.order
    place, lines = _places(order)
    for i in _critical(timeline):
        rank, at = order.ranks[i], place[i]
        line = lines[rank]
        for to in range(at - 1, max(-1, at - 1 - FARTHEST), -1):
            before, action = order.actions[line[to]], order.actions[i]
            if _bound(before, action):
                break
            yield rank, at, to


def _bound(before: Action, action: Action) -> bool:
    """Whether `before` never comes after `action` on one rank: halves, and microbatches of one stage in turn."""
    if before.stage != action.stage:
        return False
    same = before.kind is action.kind or {before.kind, action.kind} == {Kind.BACKWARD, Kind.INPUT}
    return same or before.microbatch == action.microbatch


def _places(order: Order) -> tuple[list[int], list[list[int]]]:
    lines: list[list[int]] = [[] for _ in order.schedule.ranks]
    place = []
    for i, rank in enumerate(order.ranks):
        place.append(len(lines[rank]))
        lines[rank].append(i)
    return place, lines


def _critical(timeline: Timeline) -> list[int]:
    """The entries of a longest chain, from the last one back."""
    order = timeline.order
    place, lines = _places(order)
    i = max(range(len(order.ranks)), key=timeline.ends_s.__getitem__)
    found = [i]
    while timeline.starts_s[i] > 0:
        before = lines[order.ranks[i]][place[i] - 1] if place[i] else -1
        if before >= 0 and timeline.ends_s[before] >= timeline.starts_s[i]:
            i = before
        else:
            i = order.awaits[i]
            assert i >= 0
        found.append(i)
    return found
