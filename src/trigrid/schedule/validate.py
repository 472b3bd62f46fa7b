"""What makes a schedule one that can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trigrid.schedule.actions import Action, Kind, Schedule, channels, needs, receives, result, sends_to

OUTSTANDING_SENDS = 1
TRAINING = (Kind.FORWARD, Kind.BACKWARD)


def validate(schedule: Schedule, kinds: Sequence[Kind] = TRAINING) -> None:
    """Raise ValueError where `schedule` misses, repeats or misplaces an action of `kinds`, or waits in a circle.

    A backward may be whole or in its two halves, for each stage and microbatch on its own.
    """
    _complete(schedule, Kind.BACKWARD in kinds)
    _play(schedule)


def _complete(schedule: Schedule, training: bool) -> None:
    """Every stage and microbatch has its forward and, in training, one of both forms of its backward, in its place."""
    counts = Counter(action for actions in schedule.ranks for action in actions)
    backwards = {Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT} if training else set()
    for action, times in counts.items():
        known = 0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches
        if not known or action.kind not in {Kind.FORWARD} | backwards:
            raise ValueError(f"schedule {schedule.name}: {action} is of no stage or microbatch")
        if times > 1:
            raise ValueError(f"schedule {schedule.name}: {action} appears {times} times")
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            there = {kind for kind in backwards if Action(kind, stage, m) in counts}
            wanted = {Kind.INPUT, Kind.WEIGHT} if there - {Kind.BACKWARD} else backwards & {Kind.BACKWARD}
            if extra := there - wanted:
                whole, half = Action(extra.pop(), stage, m), Action(min(there & wanted), stage, m)
                raise ValueError(f"schedule {schedule.name}: {whole} and {half} do the same work")
            for kind in (Kind.FORWARD, *sorted(wanted)):
                if Action(kind, stage, m) not in counts:
                    raise ValueError(f"schedule {schedule.name}: missing {Action(kind, stage, m)}")
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if schedule.placement[action.stage] != rank:
                raise ValueError(f"schedule {schedule.name}: {action} is on rank {rank}, its stage is not")


def _play(schedule: Schedule) -> None:
    """Play every channel as an in-order rendezvous, as NCCL has it.

    The model is the interpreter's own: on each channel one receive is posted ahead, and at most OUTSTANDING_SENDS sends
    are unfinished. Send k finishes once receive k is posted, that is once receive k − 1 has been taken. Two stages of
    one rank hand over without a channel.
    """
    order = {message: (pair, k) for pair, messages in channels(schedule).items() for k, message in enumerate(messages)}
    sent: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()
    done: set[Action] = set()
    at = [0] * len(schedule.ranks)

    def advance(rank: int) -> bool:
        """Run `rank` until it must wait; whether it moved."""
        moved = False
        while at[rank] < len(schedule.ranks[rank]):
            action = schedule.ranks[rank][at[rank]]
            if action not in done:
                message = receives(schedule, action)
                if message is not None:
                    pair, k = order[message]
                    while taken[pair] <= k and sent[pair] > taken[pair]:
                        taken[pair] += 1
                        moved = True
                    if taken[pair] <= k:
                        return moved
                elif (need := needs(schedule, action)) is not None and need not in done:
                    return moved
                if (before := _before(action)) and action._replace(kind=before) not in done:
                    word = "input backward" if before is Kind.INPUT else "forward"
                    raise ValueError(f"schedule {schedule.name}: {action} comes before its {word} on rank {rank}")
                done.update((action, result(action)))
                moved = True
            target = sends_to(schedule, action)
            if target is not None:
                pair = (rank, target)
                if sent[pair] - taken[pair] > OUTSTANDING_SENDS:
                    return moved
                sent[pair] += 1
            at[rank] += 1
            moved = True
        return moved

    while any([advance(rank) for rank in range(len(schedule.ranks))]):
        pass
    stuck = [
        f"rank {rank} at {schedule.ranks[rank][at[rank]]}"
        for rank in range(len(schedule.ranks))
        if at[rank] < len(schedule.ranks[rank])
    ]
    if stuck:
        raise ValueError(f"schedule {schedule.name}: deadlock, {'; '.join(stuck)}")


def _before(action: Action) -> Kind | None:
    """What the same stage must have done for the same microbatch."""
    if action.kind is Kind.FORWARD:
        return None
    return Kind.INPUT if action.kind is Kind.WEIGHT else Kind.FORWARD
