"""Which layouts a search looks at: exactly those that the rules allow, each once."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from trigrid.job import job_from_text
from trigrid.plan.layouts import job_of, neutral
from trigrid.plan.plan import setup_of
from trigrid.plan.setup import Setup
from trigrid.plan.software import load_software
from trigrid.plan.space import KNOBS, Space
from trigrid.schedule import NAMES
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout
from trigrid.spec.rules import check

BF16 = load_software("trigrid")
TEXT = """\
[model]
name = "small"
hidden = 512
layers = 7
heads = 8
kv_heads = 2
head_dim = 64
ffn = 1024
vocab = 1000
context = 4096
[batch]
sequence = 2048
global_batch = {batch}
[run]
steps = 1
"""


def small(batch: int = 6) -> Job:
    return job_from_text(TEXT.format(batch=batch))


def canonical(setup: Setup) -> Setup:
    """Interleaving one stage is 1f1b; stage 1 reduced per microbatch is stage 2, and the other way around; stage 3
    gathered once a step is one of these while it runs."""
    if setup.schedule == "interleaved" and setup.virtual == 1:
        setup = setup._replace(schedule="1f1b")
    if setup.pp == 1:
        setup = setup._replace(schedule="1f1b")
    if setup.zero in (1, 2) or (setup.zero == 3 and not setup.gather_per_use):
        setup = setup._replace(zero=2 if setup.reduce_per_microbatch else 1)
    return setup


def every_legal(job: Job, space: Space) -> set[Setup]:
    """By brute force, what `check` passes, with the dp that the space takes."""
    found = set()
    degrees = product(range(1, 9), range(1, 10))
    policies = list(product(range(4), ("per_step", "per_use"), ("per_step", "per_microbatch")))
    for tp, pp in degrees:
        if tp * pp > space.gpus or not (dp := space.data_parallel(tp * pp)):
            continue
        for schedule, virtual in product(NAMES, range(1, 8)):
            piped = replace(job.parallel, tp=tp, pp=pp, dp=dp, schedule=schedule, virtual_stages=virtual)
            if check(replace(job, parallel=piped)):
                continue
            for (zero, gather, reduce), micro_batch in product(policies, range(1, job.batch.global_batch + 1)):
                layout = replace(piped, zero=zero, gather=gather, reduce=reduce)
                candidate = replace(job, parallel=layout, batch=replace(job.batch, micro_batch=micro_batch))
                if not check(candidate):
                    found.add(canonical(setup_of(candidate, BF16)))
    return found


def test_a_small_space_holds_what_the_rules_allow_and_each_once() -> None:
    job = small()
    opened = frozenset(KNOBS) - {"cp", "dp_replicate", "recompute"}
    space = Space(job, opened, 12, setup_of(job, BF16))
    mine = list(space.setups())
    assert len(mine) == len(set(mine)) == space.count()
    legal = every_legal(job, space)
    worlds = {setup.world for setup in mine}
    assert max(worlds) == 12
    # One rank shares no state, so that every way to shard is the same there; layouts that use too little are no
    # candidates.
    kept = {s for s in legal if s.world in worlds and (s.dp > 1 or (s.zero, s.gather_per_use) == (1, False))}
    kept = {s for s in kept if (s.tp, s.pp, s.dp) in {(g.tp, g.pp, g.dp) for g in space.grids}}
    assert set(map(canonical, mine)) == kept


@pytest.mark.parametrize("gpus", [1, 7, 24, 96])
def test_every_candidate_is_sound(gpus: int) -> None:
    job = small(48)
    setups = list(Space(job, frozenset(KNOBS), gpus, setup_of(job, BF16)).setups())
    for setup in random.Random(0).sample(setups, min(len(setups), 60)):
        made = job_of(job, setup)
        assert check(made) == []
        assert setup_of(made, BF16) == setup
        assert setup.world <= gpus


@pytest.mark.parametrize(("compile", "split"), [(False, {"zb-h1", "zbv", "dualpipev"}), (True, set())])
def test_no_candidate_splits_backwards_where_blocks_are_compiled(compile: bool, split: set[str]) -> None:
    job = replace(small(48), run=replace(small().run, compile=compile))
    setups = Space(job, frozenset(KNOBS), 24, setup_of(job, BF16)).setups()
    assert {setup.schedule for setup in setups} == {"1f1b", "gpipe", "interleaved"} | split


def test_what_is_given_is_kept() -> None:
    job = small(48)
    fixed = replace(job, parallel=replace(job.parallel, tp=2, pp=3, zero=2), batch=replace(job.batch, micro_batch=2))
    opened = frozenset({"dp", "schedule", "virtual_stages", "recompute"})
    setups = list(Space(fixed, opened, 48, setup_of(fixed, BF16)).setups())
    assert {(s.tp, s.pp, s.dp, s.zero, s.micro_batch) for s in setups} == {(2, 3, 8, 2, 2)}
    assert {s.schedule for s in setups} == {"1f1b", "gpipe", "zb-h1", "interleaved", "zbv", "dualpipev"}
    assert {s.recompute for s in setups} == {"none", "selective", "full"}


def test_gpus_that_do_not_factor_leave_spares_and_a_batch_that_does_not_divide_a_smaller_dp() -> None:
    """10,000 GPUs at TP 8 are 1,250 = 2 · 5⁴ groups; a global batch of 2,048 has no such divisor."""
    job = job_from_text(
        '[model]\nname = "megatron-1t"\n[batch]\nsequence = 2048\nglobal_batch = 2048\n[run]\nsteps = 1\n'
    )
    job = replace(job, parallel=replace(job.parallel, tp=8))
    grids = Space(job, frozenset({"pp", "dp"}), 10_000, setup_of(job, BF16)).grids
    assert {grid.dp for grid in grids} <= {2**k for k in range(12)}
    assert max(grid.world for grid in grids) == 8 * 39 * 32 == 9_984
    assert min(grid.world for grid in grids) >= 0.875 * 9_984


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ({}, Layout()),
        ({"schedule": "zbv"}, Layout(schedule="zbv", virtual_stages=2, pp=2)),
        ({"virtual_stages": 3}, Layout(schedule="interleaved", virtual_stages=3, pp=2)),
        ({"gather": "per_use"}, Layout(gather="per_use", zero=3)),
        ({"dp_replicate": 4}, Layout(dp_replicate=4, dp=4)),
        ({"stage_layers": (3, 2, 2)}, Layout(stage_layers=(3, 2, 2), pp=3)),
    ],
)
def test_a_base_goes_with_what_is_given(given: dict[str, object], base: Layout) -> None:
    found = neutral(Layout(**given), frozenset(given))  # type: ignore[arg-type]
    assert found == base
    assert check(replace(small(24), parallel=found)) == []
