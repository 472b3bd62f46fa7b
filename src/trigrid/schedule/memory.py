"""What a rank holds while it runs its part of a schedule; how long each action takes does not matter for the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from trigrid.schedule.actions import Action, Kind, Schedule
from trigrid.schedule.generators import rank_actions
from trigrid.schedule.replay import Timeline


class InFlight(NamedTuple):
    """The most stages times microbatches whose activations a rank holds, from each forward to its input backward, and
    to its weight backward; equal where backwards are whole."""

    until_input: int
    until_weight: int


def in_flight(schedule: Schedule) -> tuple[InFlight, ...]:
    """The maximum of each rank."""
    ones, none = (1,) * schedule.stages, (0,) * schedule.stages
    return tuple(map(InFlight, peak_bytes(schedule, ones, none), peak_bytes(schedule, ones, ones)))


def peak_bytes(schedule: Schedule, forward_bytes: Sequence[int], weight_bytes: Sequence[int]) -> tuple[int, ...]:
    """The most bytes that each rank holds for microbatches under way.

    forward_bytes: by stage, held from a forward to its backward, whole or of the input; weight_bytes: by stage, held
    from there to the weight backward where that is apart (what is left of the activations, and the output gradients).
    """
    change = _changes(forward_bytes, weight_bytes)
    return tuple(
        max(accumulate((change[kind][stage] for kind, stage, _ in actions), initial=0)) for actions in schedule.ranks
    )


def rank_peak_bytes(
    name: str, pp: int, microbatches: int, rank: int, forward_bytes: Sequence[int], weight_bytes: Sequence[int]
) -> int:
    """What `peak_bytes` says of one rank of a named schedule, which is not written out for it.

    forward_bytes, weight_bytes: as in `peak_bytes`, but by chunk: of the stages of this rank only.
    """
    change = _changes(forward_bytes, weight_bytes)
    gains = [gain for kind in Kind for gain in change[kind]]
    if name != "gpipe":
        # What fills the pipeline is there by then: p microbatches more are one more round like those before.
        microbatches = min(microbatches, 3 * pp + microbatches % pp)
    places = _places(name, pp, microbatches, len(forward_bytes), rank)
    return max(accumulate([gains[place] for place in places], initial=0))


@lru_cache(maxsize=512)
def _places(name: str, pp: int, microbatches: int, chunks: int, rank: int) -> tuple[int, ...]:
    """For each action of a rank where its kind and chunk stand among all kinds by all chunks."""
    actions = rank_actions(name, pp, microbatches, chunks, rank)
    chunk = {stage: number for number, stage in enumerate(sorted({action.stage for action in actions}))}
    first = {kind: number * chunks for number, kind in enumerate(Kind)}
    return tuple(first[kind] + chunk[stage] for kind, stage, _ in actions)


def messages_alive(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """By rank, stage boundaries that the pipeline has in hand during each of its actions, beside what the action starts
    from and makes.

    Of each channel the receive that is posted ahead, what was taken already to get at a message behind it (a channel
    gives them in the sender's order), and the send that may be unfinished; and what a stage has handed to another one
    of the same rank, which has not begun with it.
    """
    placement, stages = schedule.placement, schedule.stages
    inboxes: list[dict[int, list[Action]]] = [{} for _ in schedule.ranks]
    lines: list[list[tuple[int, Action, int]]] = []
    for rank, actions in enumerate(schedule.ranks):
        line = []
        for action in actions:
            kind, stage, microbatch = action
            ahead = {Kind.FORWARD: 1, Kind.WEIGHT: 0}.get(kind, -1)
            before, after = (stage - ahead, stage + ahead) if ahead else (stages, stages)
            source = placement[before] if 0 <= before < stages else -1
            target = placement[after] if 0 <= after < stages else -1
            name = Kind.FORWARD if ahead > 0 else Kind.BACKWARD
            line.append((source, Action(name, before, microbatch), target))
            if target not in (-1, rank):
                inboxes[target].setdefault(rank, []).append(Action(name, stage, microbatch))
        lines.append(line)
    return tuple(_in_hand(rank, line, inboxes[rank]) for rank, line in enumerate(lines))


def _in_hand(
    rank: int, line: Sequence[tuple[int, Action, int]], inboxes: Mapping[int, Sequence[Action]]
) -> tuple[int, ...]:
    """Of one rank. line: where what each action starts from comes from, its name, and where its result goes."""
    taken = dict.fromkeys(inboxes, 0)
    posted, handed = len(inboxes), 0
    waiting: set[Action] = set()
    sent: set[int] = set()
    found = []
    for source, name, target in line:
        if source == rank:
            handed -= 1
        elif source >= 0:
            names = inboxes[source]
            while name not in waiting:
                waiting.add(names[taken[source]])
                taken[source] += 1
                posted -= taken[source] == len(names)
            waiting.remove(name)
        found.append(posted + len(waiting) + len(sent) + handed)
        if target == rank:
            handed += 1
        elif target >= 0:
            sent.add(target)
    return tuple(found)


def bytes_over_time(
    timeline: Timeline, forward_bytes: Sequence[int], weight_bytes: Sequence[int]
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """For each rank (time_s, bytes held from then on), at each change.

    Arguments as in `peak_bytes`. A forward's bytes count from its start, a backward gives back at its end.
    """
    change = _changes(forward_bytes, weight_bytes)
    held = [0] * len(timeline.busy_s)
    found: list[list[tuple[float, int]]] = [[] for _ in held]
    for rank, (kind, stage, _), start_s, end_s in timeline.spans:
        held[rank] += change[kind][stage]
        found[rank].append((start_s if kind is Kind.FORWARD else end_s, held[rank]))
    return tuple(map(tuple, found))


def _changes(forward_bytes: Sequence[int], weight_bytes: Sequence[int]) -> Mapping[Kind, Sequence[int]]:
    """By kind and stage, how many bytes more are held after an action than before it."""
    return {
        Kind.FORWARD: forward_bytes,
        Kind.BACKWARD: [-held for held in forward_bytes],
        Kind.INPUT: [later - held for held, later in zip(forward_bytes, weight_bytes, strict=True)],
        Kind.WEIGHT: [-held for held in weight_bytes],
    }
