"""What makes a schedule one that can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trigrid.schedule.actions import Action, Kind, Schedule, channels, receives, sends_to

OUTSTANDING_SENDS = 1
TRAINING = (Kind.FORWARD, Kind.BACKWARD)


def validate(schedule: Schedule, kinds: Sequence[Kind] = TRAINING) -> None:
    """Raise ValueError where `schedule` misses, repeats or misplaces an action of `kinds`, or waits in a circle."""
    _complete(schedule, kinds)
    _play(schedule)


def _complete(schedule: Schedule, kinds: Sequence[Kind]) -> None:
    counts = Counter(action for actions in schedule.ranks for action in actions)
    wanted = {Action(k, s, m) for k in kinds for s in range(schedule.stages) for m in range(schedule.microbatches)}
    if missing := wanted - counts.keys():
        raise ValueError(f"schedule {schedule.name}: missing {min(missing)}")
    if extra := counts.keys() - wanted:
        raise ValueError(f"schedule {schedule.name}: {min(extra)} is of no stage or microbatch")
    if repeated := [action for action, n in counts.items() if n > 1]:
        raise ValueError(f"schedule {schedule.name}: {repeated[0]} appears {counts[repeated[0]]} times")
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if schedule.placement[action.stage] != rank:
                raise ValueError(f"schedule {schedule.name}: {action} is on rank {rank}, its stage is not")


def _play(schedule: Schedule) -> None:
    """Play every channel as an in-order rendezvous, as NCCL has it.

    The model is the interpreter's own: on each channel one receive is posted ahead, and at most OUTSTANDING_SENDS sends
    are unfinished. Send k finishes once receive k is posted, that is once receive k − 1 has been taken.
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
                elif (local := _local_need(schedule, action)) is not None and local not in done:
                    return moved
                if action.kind is Kind.BACKWARD and action._replace(kind=Kind.FORWARD) not in done:
                    raise ValueError(f"schedule {schedule.name}: {action} comes before its forward on rank {rank}")
                done.add(action)
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


def _local_need(schedule: Schedule, action: Action) -> Action | None:
    """The action of the same rank whose result `action` needs, or None."""
    source = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
    if 0 <= source < schedule.stages and schedule.placement[source] == schedule.placement[action.stage]:
        return action._replace(stage=source)
    return None
