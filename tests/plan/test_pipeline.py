"""The closed form of a pipeline against its replay: above it for unequal stages, equal to it for equal ones."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.plan.constants import shipped
from trigrid.plan.engine_memory import memory_of
from trigrid.plan.pipeline import (
    Chunk,
    Pipeline,
    Slowest,
    closed_form,
    durations,
    estimate,
    least_s,
    pipeline_of,
    shape_of,
)
from trigrid.plan.setup import Setup
from trigrid.plan.software import SOFTWARE
from trigrid.schedule import NAMES, end_s
from trigrid.spec.models import load_model

setups = st.builds(
    lambda name, pp, m, v: Setup(
        schedule=name, pp=pp, microbatches=m, virtual={"interleaved": v, "zbv": 2, "dualpipev": 2}.get(name, 1)
    ),
    st.sampled_from(NAMES),
    st.integers(2, 6),
    st.integers(1, 24),
    st.integers(1, 4),
)


def chunk(*seconds: float) -> Chunk:
    return Chunk(*seconds, *[0.0] * 8)


def piped(setup: Setup, stages: tuple[Chunk, ...]) -> Pipeline:
    held = [[s for s in range(len(stages)) if setup.holder(s) == rank] for rank in range(setup.pp)]
    # Chunks stand in for the units of a stage: equal ones are of a kind.
    shape = shape_of(stages, held, ("",) * len(stages))  # type: ignore[arg-type]
    return pipeline_of(shape, shape.kinds)  # type: ignore[arg-type]


def replayed(setup: Setup, stages: tuple[Chunk, ...], message_s: float) -> float:
    times = durations(setup, stages, message_s)
    return end_s(setup.schedule, setup.pp, setup.microbatches, setup.virtual, times)


def exact(setup: Setup) -> bool:
    """But for interleaved where m is above p and no multiple of it."""
    p, m = setup.pp, setup.microbatches
    return setup.schedule != "interleaved" or setup.virtual == 1 or m <= p or m % p == 0


@given(setups, st.tuples(*[st.floats(0.05, 1.0)] * 3))
@settings(max_examples=200, deadline=None)
def test_equal_stages_with_free_messages_take_what_the_closed_form_says(
    setup: Setup, seconds: tuple[float, float, float]
) -> None:
    stages = (chunk(*seconds),) * (setup.pp * setup.virtual)
    closed, played = closed_form(setup, piped(setup, stages), 0.0), replayed(setup, stages, 0.0)
    if exact(setup):
        assert closed == pytest.approx(played, rel=1e-9)
    else:
        assert played * (1 - 1e-9) <= closed <= played * 1.8


@given(setups, st.randoms(use_true_random=False), st.floats(0.0, 0.5), st.sampled_from(["any", "ends", "layers"]))
@settings(max_examples=300, deadline=None)
def test_the_closed_form_is_never_below_the_replay_nor_the_bound_above_it(
    setup: Setup, random: Random, message_s: float, kind: str
) -> None:
    """Stages of any times; equal ones between a first and a last one that do more; and whole layers, not equally
    many."""
    count = setup.pp * setup.virtual
    layer = [random.uniform(0.05, 1.0) for _ in range(3)]
    layers = [random.randint(1, 3) if kind == "layers" else 2 for _ in range(count)]
    stages = [chunk(*(n * seconds for seconds in layer)) for n in layers]
    if kind == "any":
        stages = [chunk(*(random.uniform(0.0, 2.0) for _ in range(3))) for _ in range(count)]
    else:
        stages[0] = chunk(*(seconds + 0.1 * random.random() for seconds in stages[0][:3]))
        stages[-1] = chunk(*(seconds + random.random() for seconds in stages[-1][:3]))
    made, found = tuple(stages), piped(setup, tuple(stages))
    played = replayed(setup, made, message_s)
    assert closed_form(setup, found, message_s) >= played * (1 - 1e-9)
    fastest = Slowest(*(min(stage[i] for stage in stages) for i in range(3)))
    assert least_s(setup, fastest) <= played * (1 + 1e-9)
    assert estimate(setup, found, message_s) <= closed_form(setup, found, message_s)


@given(setups, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_gpipe_is_exact_whatever_its_stages_and_messages(setup: Setup, random: Random) -> None:
    setup = setup._replace(schedule="gpipe", virtual=1)
    stages = tuple(chunk(*(random.uniform(0.0, 2.0) for _ in range(3))) for _ in range(setup.pp))
    message_s = random.uniform(0.0, 3.0)
    closed = closed_form(setup, piped(setup, stages), message_s)
    assert closed == pytest.approx(replayed(setup, stages, message_s), rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev"])
def test_the_closed_form_of_memory_is_never_below_the_schedules_count(schedule: str, recompute: str) -> None:
    """Under full recomputation what waits for weight backwards is more than what waits for the backwards of inputs."""
    for pp in (2, 3, 4, 6):
        v = 1 if schedule == "zb-h1" else 2
        counts = memory_of(replace(load_model("llama3-8b"), layers=2 * pp * v), SOFTWARE["trigrid"], shipped())
        for m in range(1, 2 * pp + 3):
            setup = Setup(pp=pp, virtual=v, microbatches=m, schedule=schedule, recompute=recompute, sequence=2048)
            for rank in range(pp):
                closed, counted = (counts.use(setup, rank, exact=exact).training_bytes for exact in (False, True))
                assert closed >= counted - v, (pp, m, rank)
