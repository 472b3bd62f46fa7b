"""What is alive on a rank of this project's engine over the actions of its schedule: in each what `alive` says, and
beside it the microbatches that are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from trigrid.plan.alive import Chunk, Moment
from trigrid.schedule import Action, Kind, Schedule, make_schedule, messages_alive

NUMBERS = {kind: number for number, kind in enumerate(Kind)}


class Turns(NamedTuple):
    """The actions of a rank, each as a number (`_place`), and how many messages are there during each of them
    (`schedule.messages_alive`); last: which of them is the first that is the last backward of a stage."""

    places: tuple[int, ...]
    messages: tuple[int, ...]
    last: int


def _place(number: int, kind: int, last: bool) -> int:
    """Of an action of `kind` of the rank's stage `number`, which is its last backward or not."""
    return 8 * number + 2 * kind + last


@lru_cache(maxsize=64)
def named_turns(name: str, pp: int, microbatches: int, virtual: int) -> tuple[Turns, ...]:
    """By rank of a named schedule, without rounds that are like those before."""
    if name != "gpipe":
        microbatches = min(microbatches, 3 * pp + microbatches % pp)
    return turns_of(make_schedule(name, pp, microbatches, virtual))


def turns_of(schedule: Schedule) -> tuple[Turns, ...]:
    """By rank."""
    return tuple(map(_turns, schedule.ranks, messages_alive(schedule)))


def _turns(actions: Sequence[Action], messages: tuple[int, ...]) -> Turns:
    numbers = {stage: number for number, stage in enumerate(sorted({action.stage for action in actions}))}
    last = {action.stage: at for at, action in enumerate(actions) if action.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    places = (
        _place(numbers[stage], NUMBERS[kind], last.get(stage) == at) for at, (kind, stage, _) in enumerate(actions)
    )
    return Turns(tuple(places), messages, min(last.values(), default=len(actions)))


class Fullest(NamedTuple):
    """The fullest moment of a rank's actions. total: all that is no state; messages: of it, those between stages; held:
    what other microbatches keep beside what the head has of them, `heads`; earlier: where shards wait for the update,
    the fullest moment before."""

    total: float
    messages: float
    held: float
    heads: float
    moment: Moment
    earlier: float = 0.0


def fullest(chunks: Sequence[Chunk], mine: Turns, boundary: float) -> Fullest:
    """Of a rank that holds `chunks`; boundary: bytes of a message."""
    places, messages, last = mine
    # By place: what an action has beside what was there, before it begins a reduction and from there on; what it
    # leaves of it; what its reduction holds until the next one.
    first: list[float] = []
    then: list[float] = []
    change: list[float] = []
    for chunk in chunks:
        for kind, (before, after) in enumerate(zip(chunk.before, chunk.after, strict=True)):
            for moments in (chunk.moments[kind], chunk.last[kind]):
                first.append(moments.first.total - before)
                then.append(moments.then.total - before if moments.then else 0.0)
            change += (after - before, after - before + chunk.reduced)
        # Backwards in halves that it does not have.
        for table in (first, then, change):
            table += (0.0,) * (-len(table) % _place(1, 0, False))
    held = accumulate([change[place] for place in places[:-1]], initial=0.0)
    pending = _pending(chunks, places)
    totals = [
        here + max(first[place] + there, then[place]) + boundary * n
        for here, place, there, n in zip(held, places, pending, messages, strict=True)
    ]
    most = max(totals)
    at = totals.index(most)
    number, (kind, ends) = places[at] // 8, divmod(places[at] % 8, 2)
    now = chunks[number]
    moment = (now.last if ends else now.moments)[kind].most(pending[at])
    waits = any(chunk.reduced for chunk in chunks)
    heads = -now.head[kind == 3] if kind else 0.0
    if any(chunk.head[0] for chunk in chunks):
        for place in places[:at]:
            kept, later = chunks[place // 8].head
            heads += (kept, -kept, later - kept, -later)[place % 8 // 2]
    earlier = max(totals[:last], default=0.0) if waits and at >= last else 0.0
    waited = sum(chunks[place // 8].reduced for place in places[last:at] if place % 2)
    others = most - boundary * messages[at] - moment.total - waited
    return Fullest(most, boundary * messages[at], others - heads, heads, moment, earlier)


def _pending(chunks: Sequence[Chunk], places: Sequence[int]) -> list[float]:
    """What the reduction that was begun last holds when each action begins."""
    if not any(chunk.pending for chunk in chunks):
        return [0.0] * len(places)
    found, now = [], 0.0
    for place in places:
        found.append(now)
        # A whole backward, or one of the weights.
        if place % 8 // 2 in (1, 3):
            now = chunks[place // 8].pending or now
    return found
