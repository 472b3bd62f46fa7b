"""Our schedules beside those of torch.distributed.pipelining: the same orders, or none worse; and the closed forms."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from trigrid.schedule import (
    Action,
    Durations,
    Kind,
    Schedule,
    in_flight,
    make_schedule,
    order_of,
    replay,
    validate,
)

KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT, "W": Kind.WEIGHT}
SIZES = [*product((1, 2, 3, 4), (1, 2, 3, 4, 7, 8, 12)), (8, 8), (8, 16), (8, 19)]


class Recorder:
    """A pipeline stage that notes what torch has it compute, and sends and receives nothing."""

    has_backward = True

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size = rank, ranks, ranks
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.done: list[Action] = []

    def forward_one_chunk(self, m: int, *_: object, **__: object) -> None:
        self.done.append(Action(Kind.FORWARD, self.stage_index, m))

    def backward_one_chunk(self, m: int, *_: object, **__: object) -> None:
        self.done.append(Action(Kind.BACKWARD, self.stage_index, m))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []


def torch_runs(name: str, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What each rank computes when torch's schedule of one stage per rank runs. (Its `_get_pipeline_order` is no
    oracle: in 1F1B it counts the last rank's forwards from 1.)"""
    found = []
    for rank in range(pp):
        schedule: Any = object.__new__(torch_schedules.get_schedule_class(name))
        schedule._n_microbatches, schedule._num_stages = microbatches, pp
        schedule._stage, schedule._initialize_stage = Recorder(rank, pp), lambda *_, **__: None
        schedule._has_backward, schedule.scale_grads, schedule._loss_fn = True, True, None
        schedule._internal_losses, schedule._backward_requires_autograd = [], False
        schedule._check_inputs = lambda arguments, keywords, *_: (
            arguments or [()] * microbatches,
            keywords or [{}] * microbatches,
        )
        schedule._step_microbatches()
        found.append(tuple(schedule._stage.done))
    return tuple(found)


def torch_orders(name: str, pp: int, microbatches: int, stages_per_rank: int) -> tuple[tuple[Action, ...], ...]:
    """What each rank computes in torch's schedule of several stages per rank, from the function that its constructor
    calls; the constructor itself wants stages with modules and a process group."""
    schedule: Any = object.__new__(torch_schedules.get_schedule_class(name))
    schedule._n_microbatches, schedule._num_stages = microbatches, pp * stages_per_rank
    schedule.pp_group_size, schedule.n_local_stages, schedule.num_stages = pp, stages_per_rank, pp * stages_per_rank
    schedule.number_of_rounds = max(1, microbatches // pp)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    return tuple(tuple(translated(schedule._calculate_single_rank_operations(rank))) for rank in range(pp))


def translated(actions: list[Any]) -> list[Action]:
    """Computations alone; those that torch overlaps, one after the other."""
    found: list[Action] = []
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            found += translated(list(action.sub_actions))
        elif action.computation_type.value in KINDS:
            found.append(Action(KINDS[action.computation_type.value], action.stage_index, action.microbatch_index))
    return found


@pytest.mark.parametrize(("ours", "torchs"), [("gpipe", "GPipe"), ("1f1b", "1F1B")])
def test_one_stage_per_rank_is_torchs_order(ours: str, torchs: str) -> None:
    compared = 0
    for pp, m in SIZES:
        if ours == "1f1b" and m < pp:
            continue  # torch refuses fewer microbatches than stages.
        assert make_schedule(ours, pp, m).ranks == torch_runs(torchs, pp, m), (pp, m)
        compared += 1
    assert compared > 15


def test_interleaved_is_torchs_order_where_microbatches_are_a_multiple_of_the_ranks() -> None:
    for pp, v, rounds in product((2, 3, 4, 8), (2, 3, 4), (1, 2, 3)):
        ours = make_schedule("interleaved", pp, pp * rounds, v)
        assert ours.ranks == torch_orders("Interleaved1F1B", pp, pp * rounds, v), (pp, v, rounds)


class Halves(NamedTuple):
    """Times of all stages."""

    forward_s: float
    input_s: float
    weight_s: float
    p2p_s: float = 0.0


THIRDS = Halves(1, 1, 1)


def no_worse(own: Schedule, theirs: Schedule, *every: Halves) -> None:
    """Whether `own` takes no longer and holds no more in flight than `theirs`."""
    for times in every:
        took = Durations.equal(own.stages, *times)
        mine, other = (replay(order_of(schedule), took).step_s for schedule in (own, theirs))
        assert mine <= other, (len(own.ranks), own.microbatches, times)
    for held, torchs in zip(in_flight(own), in_flight(theirs), strict=True):
        assert held.until_input <= torchs.until_input
        assert held.until_weight <= torchs.until_weight


def torch_v(name: str, pp: int, microbatches: int) -> Schedule:
    placement = (*range(pp), *reversed(range(pp)))
    return Schedule(f"torch {name}", microbatches, placement, torch_orders(name, pp, microbatches, 2))


@pytest.mark.parametrize(("ours", "torchs"), [("zbv", "ZBVZeroBubble"), ("dualpipev", "DualPipeV")])
def test_v_shapes_pass_and_ours_are_no_worse_in_time_or_memory(ours: str, torchs: str) -> None:
    """Free messages and slow ones. DualPipeV of torch wants at least 2p microbatches."""
    for pp, m in SIZES:
        if ours == "dualpipev" and m < 2 * pp:
            continue
        theirs, own = torch_v(torchs, pp, m), make_schedule(ours, pp, m)
        validate(theirs)
        no_worse(own, theirs, THIRDS, THIRDS._replace(p2p_s=0.25), Halves(1, 1.25, 0.75))


def test_zbv_is_no_worse_than_torchs_for_any_number_of_microbatches() -> None:
    """With the times that torch assumes, also where microbatches are too few to fill the V."""
    for pp in (*range(2, 9), 16):
        for m in range(1, 4 * pp + 1) if pp < 16 else (1, 15, 16, 17, 20, 22, 24, 27, 30, 31, 32, 33, 64):
            own = make_schedule("zbv", pp, m)
            validate(own)
            no_worse(own, torch_v("ZBVZeroBubble", pp, m), THIRDS)


def test_bubbles_of_equal_stages_are_the_closed_forms() -> None:
    """gpipe, 1f1b: (p − 1)/m; interleaved: (p − 1)/(v·m); zb-h1: (p − 1)(F + I − W) per rank; zbv: (p − 1)F."""
    for pp, rounds in product((2, 3, 4, 8), (2, 3)):
        m = pp * rounds
        for name, v in [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]:
            schedule = make_schedule(name, pp, m, v)
            timeline = replay(order_of(schedule), Durations.equal(pp * v, 1, 1, 1))
            assert timeline.bubble_ratio == pytest.approx((pp - 1) / (v * m), rel=1e-12), (name, pp, m)
        halves = replay(order_of(make_schedule("zb-h1", pp, m)), Durations.equal(pp, 3, 4, 2))
        assert halves.idle_s == pytest.approx([(pp - 1) * (3 + 4 - 2)] * pp)
        v_shaped = replay(order_of(make_schedule("zbv", pp, m)), Durations.equal(2 * pp, 1, 1, 1))
        assert v_shaped.idle_s == pytest.approx([pp - 1] * pp)


def test_four_stages_reach_an_idle_share_of_8_percent_at_35_microbatches() -> None:
    shares = {
        m: replay(order_of(make_schedule("1f1b", 4, m)), Durations.equal(4, 1, 1, 1)).idle_share for m in (34, 35)
    }
    assert shares[34] > 0.08 > shares[35]
    assert f"{shares[35]:.1%}" == "7.9%"
