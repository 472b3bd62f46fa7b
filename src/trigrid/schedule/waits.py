"""What the ranks of a timeline wait for while they idle."""

from __future__ import annotations

from typing import NamedTuple

from trigrid.schedule.replay import Timeline


class Waits(NamedTuple):
    """Idle seconds of a rank: message_s while what it needs next is under way to it, the exposed part of P2P; bubble_s
    the rest, while that is not made yet, before its first and after its last action."""

    message_s: float
    bubble_s: float


def waits(timeline: Timeline) -> tuple[Waits, ...]:
    """Of each rank."""
    order, ends_s = timeline.order, timeline.ends_s
    free_s = [0.0] * len(timeline.busy_s)
    exposed_s = [0.0] * len(timeline.busy_s)
    for rank, needed, start_s, end_s in zip(order.ranks, order.awaits, timeline.starts_s, ends_s, strict=True):
        if needed >= 0 and start_s > free_s[rank]:
            exposed_s[rank] += start_s - max(free_s[rank], ends_s[needed])
        free_s[rank] = end_s
    return tuple(Waits(exposed, idle - exposed) for exposed, idle in zip(exposed_s, timeline.idle_s, strict=True))
