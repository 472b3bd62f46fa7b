"""What the validator refuses: planted faults, and random schedules judged by a graph of what waits for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.schedule import NAMES, Action, Kind, Schedule, channels, make_schedule, needs, receives, result, validate
from trigrid.schedule.validate import OUTSTANDING_SENDS

F, B, INPUT, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT
Ranks = list[list[Action]]


def schedule_of(*lines: str, placement: tuple[int, ...] | None = None, name: str = "planted") -> Schedule:
    """A schedule from one line per rank, of actions such as "F0.1" (kind, stage, microbatch)."""
    ranks = tuple(
        tuple(Action(Kind(word[0]), *map(int, word[1:].split("."))) for word in line.split()) for line in lines
    )
    microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    return Schedule(name, microbatches, placement or tuple(range(len(ranks))), ranks)


def changed(schedule: Schedule, change: Callable[[Ranks], object]) -> Schedule:
    ranks = [list(actions) for actions in schedule.ranks]
    change(ranks)
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


# Planted faults

SOUND = make_schedule("1f1b", 3, 4)


def _insert(rank: int, at: int, action: Action) -> Callable[[Ranks], object]:
    return lambda ranks: ranks[rank].insert(at, action)


def _swap(rank: int, a: Action, b: Action) -> Callable[[Ranks], object]:
    def change(ranks: Ranks) -> None:
        i, j = ranks[rank].index(a), ranks[rank].index(b)
        ranks[rank][i], ranks[rank][j] = b, a

    return change


def _move(action: Action, to: int) -> Callable[[Ranks], object]:
    def change(ranks: Ranks) -> None:
        ranks[action.stage].remove(action)
        ranks[to].append(action)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ranks: ranks[1].remove(Action(F, 1, 2)), "missing F1.2"),
        (lambda ranks: ranks[2].remove(Action(B, 2, 3)), "missing B2.3"),
        (lambda ranks: ranks[1].clear(), "missing F1.0"),
        (_insert(0, 3, Action(F, 0, 1)), "F0.1 appears 2 times"),
        (_insert(2, 8, Action(B, 2, 0)), "B2.0 appears 2 times"),
        (_insert(0, 0, Action(F, 0, 4)), "F0.4 is of no stage or microbatch"),
        (_insert(2, 0, Action(F, 3, 0)), "F3.0 is of no stage or microbatch"),
        (_insert(0, 0, Action(B, -1, 0)), "B-1.0 is of no stage or microbatch"),
        (_move(Action(B, 1, 3), 2), "B1.3 is on rank 2, its stage is not"),
        (_swap(2, Action(F, 2, 1), Action(B, 2, 1)), "B2.1 comes before its forward on rank 2"),
        (_swap(0, Action(F, 0, 0), Action(B, 0, 0)), "deadlock"),
        (_swap(1, Action(F, 1, 3), Action(B, 1, 3)), "deadlock"),
    ],
)
def test_a_planted_fault_is_named(change: Callable[[Ranks], object], message: str) -> None:
    """R49: nothing missing, nothing twice, nothing in the wrong place, no backward before its forward."""
    validate(SOUND)
    with pytest.raises(ValueError, match=f"schedule 1f1b: .*{message}"):
        validate(changed(SOUND, change))


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """R49, R50: stage 1 wants microbatch 1 first, which stage 0 forwards only after the backward of microbatch 0."""
    with pytest.raises(ValueError, match=r"deadlock, rank 0 at B0\.0; rank 1 at F1\.1"):
        validate(schedule_of("F0.0 B0.0 F0.1 B0.1", "F1.1 B1.1 F1.0 B1.0"))


def _gpipe_beside_1f1b(microbatches: int) -> Schedule:
    ranks = (make_schedule("gpipe", 2, microbatches).ranks[0], make_schedule("1f1b", 2, microbatches).ranks[1])
    return Schedule("mixed", microbatches, (0, 1), ranks)


def test_ranks_that_cannot_get_rid_of_their_messages_are_named() -> None:
    """R50: stage 0 sends forwards only, stage 1 answers each; with six of them both wait for the other to receive.

    A transport that buffers without limit would hide it. With five, each direction has one posted and one unfinished.
    """
    assert OUTSTANDING_SENDS == 1
    for microbatches in range(1, 6):
        validate(_gpipe_beside_1f1b(microbatches))
    for microbatches in range(6, 12):
        with pytest.raises(ValueError, match=r"deadlock, rank 0 at F0\.5; rank 1 at B1\.2"):
            validate(_gpipe_beside_1f1b(microbatches))


def test_messages_may_be_taken_early_and_used_later() -> None:
    """Stage 1 backwards in reverse; stage 0 takes every message of the channel to reach the one it wants first."""
    validate(schedule_of("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.0 F1.1 F1.2 B1.2 B1.1 B1.0"))


# Placements with several stages per rank


def test_interleaved_and_v_shaped_schedules_are_judged_too() -> None:
    """R22, R52: two ranks with two stages each, stage 3 beside stage 1 or beside stage 0."""
    interleaved = schedule_of(
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
        placement=(0, 1, 0, 1),
    )
    validate(interleaved)
    v_shaped = schedule_of("F0.0 F3.0 B3.0 B0.0", "F1.0 F2.0 B2.0 B1.0", placement=(0, 1, 1, 0))
    validate(v_shaped)
    with pytest.raises(ValueError, match="deadlock"):
        validate(changed(v_shaped, _reorder(1, "F2.0 F1.0 B2.0 B1.0")))
    with pytest.raises(ValueError, match="deadlock"):
        validate(changed(v_shaped, _reorder(0, "F3.0 F0.0 B3.0 B0.0")))
    with pytest.raises(ValueError, match=r"missing B3\.0"):
        validate(replace(v_shaped, ranks=(v_shaped.ranks[0][:2] + v_shaped.ranks[0][3:], v_shaped.ranks[1])))


def _reorder(rank: int, line: str) -> Callable[[Ranks], object]:
    def change(ranks: Ranks) -> None:
        ranks[rank] = list(schedule_of(line).ranks[0])

    return change


def test_forwards_alone_are_a_schedule_only_where_no_backward_is_asked_for() -> None:
    forwards = schedule_of("F0.0 F0.1", "F1.0 F1.1")
    validate(forwards, (Kind.FORWARD,))
    with pytest.raises(ValueError, match=r"missing B0\.0"):
        validate(forwards)
    with pytest.raises(ValueError, match=r"missing F0\.0"):
        validate(schedule_of("B0.0", "B1.0"))
    with pytest.raises(ValueError, match="missing"):
        validate(Schedule("empty", 1, (0,), ((),)))
    with pytest.raises(ValueError, match=r"B0\.0 is of no stage or microbatch"):
        validate(schedule_of("F0.0 B0.0"), (Kind.FORWARD,))


# Backwards in two halves


def test_each_backward_may_be_whole_or_in_halves() -> None:
    """Stage 1 splits microbatch 0 and stage 0 microbatch 1: a gradient is a message whichever made it."""
    validate(schedule_of("F0.0 F0.1 B0.0 I0.1 W0.1", "F1.0 I1.0 F1.1 W1.0 B1.1"))


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("F0.0 I0.0", r"missing W0\.0"),
        ("F0.0 W0.0", r"missing I0\.0"),
        ("F0.0", r"missing B0\.0"),
        ("I0.0 W0.0", r"missing F0\.0"),
        ("F0.0 B0.0 W0.0", r"B0\.0 and W0\.0 do the same work"),
        ("F0.0 B0.0 I0.0 W0.0", r"B0\.0 and I0\.0 do the same work"),
        ("F0.0 I0.0 W0.0 W0.0", r"W0\.0 appears 2 times"),
        ("F0.0 W0.0 I0.0", r"W0\.0 comes before its input backward on rank 0"),
        ("W0.0 F0.0 I0.0", r"W0\.0 comes before its input backward on rank 0"),
        ("I0.0 F0.0 W0.0", "deadlock, rank 0 at I0\\.0; rank 1 at F1\\.0"),
    ],
)
def test_a_fault_in_a_split_backward_is_named(first: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"schedule planted: {message}"):
        validate(schedule_of(first, "F1.0 I1.0 W1.0"))


def test_a_last_stage_that_splits_before_its_forward_is_named() -> None:
    with pytest.raises(ValueError, match=r"I1\.0 comes before its forward on rank 1"):
        validate(schedule_of("F0.0 B0.0", "I1.0 F1.0 W1.0"))


def test_ranks_that_hold_weights_back_for_each_other_do_not_wait() -> None:
    """Nobody needs a weight backward, so any place behind its input backward will do."""
    validate(schedule_of("F0.0 F0.1 I0.0 I0.1 W0.1 W0.0", "F1.0 I1.0 F1.1 I1.1 W1.1 W1.0"))


# Random schedules


def waits_in_a_circle(schedule: Schedule, outstanding: int = 1) -> bool:
    """Whether no order of events respects what each must wait for: the definition that the validator plays through.

    On each channel one receive is posted ahead and `outstanding` sends may be unfinished, so with one of them send k
    starts after message k − 2 was taken. A message is taken once it was sent, once the one before it was taken, and
    once the receiver has reached the first action that needs it or one behind it.
    """
    graph: TopologicalSorter[Hashable] = TopologicalSorter()
    queue = {message: (pair, k) for pair, messages in channels(schedule).items() for k, message in enumerate(messages)}
    for rank, actions in enumerate(schedule.ranks):
        reached: Counter[tuple[int, int]] = Counter()
        for before, action in zip((None, *actions), actions, strict=False):
            start, run, over = ("start", action), ("run", action), ("over", action)
            graph.add(start, *([("over", before)] if before else []))
            graph.add(run, start)
            graph.add(over, run)
            graph.add(("made", result(action)), run)
            need = receives(schedule, action)
            if need is not None:
                pair, k = queue[need]
                graph.add(run, ("taken", pair, k))
                for j in range(reached[pair], k + 1):
                    graph.add(("taken", pair, j), start, *([("taken", pair, j - 1)] if j else []))
                reached[pair] = max(reached[pair], k + 1)
            elif (local := needs(schedule, action)) is not None:
                graph.add(run, ("made", local))
            if action.kind is not F:
                graph.add(run, ("run", action._replace(kind=INPUT if action.kind is W else F)))
            if result(action) in queue and action.kind is not W:
                pair, k = queue[result(action)]
                graph.add(("taken", pair, k), over)
                if k > outstanding:
                    graph.add(over, ("taken", pair, k - 1 - outstanding))
        assert all(pair[1] == rank for pair in reached)
    try:
        graph.prepare()
    except CycleError:
        return True
    return False


def random_schedule(random: Random) -> Schedule:
    """Every action once on its own rank, over a random placement, in an order that data could follow; then stirred."""
    stages, ranks, microbatches = random.randint(1, 5), random.randint(1, 4), random.randint(1, 9)
    placement = tuple(random.randrange(ranks) for _ in range(stages))
    left: set[Action] = set()
    for s, m in product(range(stages), range(microbatches)):
        left |= {Action(kind, s, m) for kind in random.choice([(F, B), (F, B), (F, INPUT, W)])}
    lines: Ranks = [[] for _ in range(ranks)]
    eagerness = random.choice([0.5, 0.8, 0.95])
    while left:
        ready = sorted(action for action in left if not waits_for(action) & left)
        forward = random.random() < eagerness
        action = random.choice([a for a in ready if (a.kind is F) == forward] or ready)
        lines[placement[action.stage]].append(action)
        left.remove(action)
    for _ in range(random.choice([0, 0, 1, 3])):
        line = random.choice(lines)
        if len(line) > 1:
            i, j = random.sample(range(len(line)), 2)
            line[i], line[j] = line[j], line[i]
    return Schedule("random", microbatches, placement, tuple(map(tuple, lines)))


def waits_for(action: Action) -> set[Action]:
    kind, stage, m = action
    if kind is W:
        return {Action(INPUT, stage, m)}
    if kind is F:
        return {Action(F, stage - 1, m)}
    return {Action(F, stage, m)} | {Action(backward, stage + 1, m) for backward in (B, INPUT)}


def random_warm_ups(random: Random) -> Schedule:
    """One forward, one backward, but with a warm-up of any length on each rank: what is computed is in order, yet
    a rank that runs ahead may find no one to take its messages."""
    stages, microbatches = random.randint(2, 5), random.randint(4, 14)
    lines: Ranks = []
    warm_up = 0
    for stage in reversed(range(stages)):
        warm_up = min(microbatches, warm_up + random.choice([0, 1, 1, 2, 5, 7]))
        kinds = [F] * warm_up + [F, B] * (microbatches - warm_up) + [B] * warm_up
        turn = Counter[Kind]()
        lines.insert(0, [])
        for kind in kinds:
            lines[0].append(Action(kind, stage, turn[kind]))
            turn[kind] += 1
    return Schedule("warm-ups", microbatches, tuple(range(stages)), tuple(map(tuple, lines)))


def verdict(schedule: Schedule) -> bool:
    """Whether the validator lets `schedule` pass."""
    try:
        validate(schedule)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("make", [random_schedule, random_warm_ups])
def test_the_verdict_on_random_schedules_is_that_of_their_graph(make: Callable[[Random], Schedule]) -> None:
    """R49, R50: 200 schedules of each kind are refused exactly where their events wait in a circle."""
    verdicts: Counter[bool] = Counter()
    for seed in range(200):
        schedule = make(Random(seed))
        runs = verdict(schedule)
        assert runs != waits_in_a_circle(schedule), schedule
        verdicts[runs] += 1
    assert min(verdicts[True], verdicts[False]) > 40


def test_a_buffer_without_limit_would_hide_what_the_channels_forbid() -> None:
    """R50: schedules whose data could flow, and which are refused for their channels alone."""
    hidden = 0
    for seed in range(200):
        schedule = random_warm_ups(Random(seed))
        hidden += not verdict(schedule) and not waits_in_a_circle(schedule, outstanding=schedule.microbatches)
    assert hidden > 20


actions = st.builds(Action, st.sampled_from(Kind), st.integers(-1, 3), st.integers(-1, 3))
lines = st.lists(st.lists(actions, max_size=8), max_size=4)


def complete_and_in_place(schedule: Schedule) -> bool:
    found = Counter(action for line in schedule.ranks for action in line)
    for stage, m in product(range(schedule.stages), range(schedule.microbatches)):
        kinds = "".join(sorted(action.kind for action in found.elements() if action[1:] == (stage, m)))
        if kinds not in ("BF", "FIW"):
            return False
    return all(
        action.stage in range(schedule.stages)
        and action.microbatch in range(schedule.microbatches)
        and schedule.placement[action.stage] == rank
        for rank, line in enumerate(schedule.ranks)
        for action in line
    )


@given(lines, st.lists(st.integers(-1, 4), max_size=4), st.integers(0, 3))
@settings(max_examples=120, deadline=None)
def test_whatever_is_no_schedule_is_refused_and_nothing_else_happens(
    ranks: Sequence[Sequence[Action]], placement: list[int], microbatches: int
) -> None:
    """R50: any lists of actions are a schedule that can run, or a ValueError that names it."""
    schedule = Schedule("noise", microbatches, tuple(placement), tuple(map(tuple, ranks)))
    if complete_and_in_place(schedule) and not waits_in_a_circle(schedule):
        validate(schedule)
    else:
        with pytest.raises(ValueError, match=r"^schedule noise: "):
            validate(schedule)


@given(st.randoms(use_true_random=False), st.data())
@settings(max_examples=100, deadline=None)
def test_a_legal_schedule_with_one_action_lost_repeated_or_misplaced_is_refused(
    random: Random, data: st.DataObject
) -> None:
    """R28, R49."""
    schedule = make_schedule(data.draw(st.sampled_from(NAMES)), random.randint(1, 6), random.randint(2, 8))
    rank = random.randrange(len(schedule.ranks))
    at = random.randrange(len(schedule.ranks[rank]))
    action = schedule.ranks[rank][at]
    fault = data.draw(st.sampled_from(["lost", "repeated", "misplaced"]))

    def change(ranks: Ranks) -> None:
        if fault != "repeated":
            ranks[rank].pop(at)
        if fault != "lost":
            ranks.append([])
            target = rank if fault == "repeated" else random.choice([r for r in range(len(ranks)) if r != rank])
            ranks[target].insert(random.randint(0, len(ranks[target])), action)

    expected = {
        "lost": f"missing {action}",
        "repeated": f"{action} appears 2 times",
        "misplaced": f"{action} is on rank",
    }
    with pytest.raises(ValueError, match=expected[fault]):
        validate(changed(schedule, change))
