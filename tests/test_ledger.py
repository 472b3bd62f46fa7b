"""Bytes by category, and the state that each ZeRO stage keeps between steps."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trigrid.blueprint.buckets import BucketLayout, lay_out
from trigrid.blueprint.parameters import Parameter, localise
from trigrid.ledger import Ledger, state_between_steps
from trigrid.spec.layout import Layout, zero_policy
from trigrid.spec.precision import PRECISIONS, Precision

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
RANKS = 8
# The mission's example: bf16 weights and gradients, fp32 moments, and a master copy that it leaves out.
EXAMPLE = Precision("example", compute="bf16", gather="bf16", reduce="bf16", master="fp32")


def bucket(numel: int, shards: int = RANKS) -> BucketLayout:
    return lay_out("b", [localise(Parameter(name="w", role="w", shape=(numel,)), Layout(), 0)], shards)


def state(
    numel: int, zero: Stage, precision: Precision = PRECISIONS["bf16"], shards: int = RANKS, shard: int = 0
) -> Ledger:
    return state_between_steps(bucket(numel, shards), shard, zero_policy(Layout(zero=zero)), precision)


def gigabytes(ledger: Ledger) -> dict[str, float]:
    return {category: count / 1e9 for category, count in ledger.bytes.items()}


# Ledgers


ledgers = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 10**15)).map(Ledger)


@given(ledgers, ledgers)
def test_ledgers_add_by_category(a: Ledger, b: Ledger) -> None:
    both = a + b
    assert both.total_bytes == a.total_bytes + b.total_bytes
    assert all(both[category] == a[category] + b[category] for category in "abcde")
    assert both.bytes.keys() == a.bytes.keys() | b.bytes.keys()


def test_an_absent_category_holds_nothing() -> None:
    assert Ledger()["weights"] == Ledger().total_bytes == 0
    assert Ledger({"weights": 3})["optimizer"] == 0


# State between steps


def test_eighteen_bytes_per_parameter() -> None:
    """bf16 weights 2, fp32 gradients 4, master 4, moments 8."""
    ledger = state(1000, 0, shards=1)
    assert ledger.bytes == {"weights": 2000, "master": 4000, "gradients": 4000, "optimizer": 8000}
    assert ledger.total_bytes == 18 * 1000


def test_the_memory_wall_of_405_billion() -> None:
    """The mission's 810 GB of bf16 weights, and 3,240 GB of fp32 moments, in its round 405 billion parameters."""
    assert gigabytes(state(405 * 10**9, 0, EXAMPLE, shards=1)) == {
        "weights": 810,
        "gradients": 810,
        "optimizer": 3240,
        "master": 1620,
    }


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer", "total"),
    [(0, 16, 16, 64, 96), (1, 16, 16, 8, 40), (2, 16, 2, 8, 26)],
)
def test_the_zero_example_of_the_mission(zero: Stage, weights: int, gradients: int, optimizer: int, total: int) -> None:
    """8 billion parameters over 8 ranks: 96, 40 and 26 GB; the optimizer falls eightfold, its master copy too."""
    held = gigabytes(state(8 * 10**9, zero, EXAMPLE))
    assert (held["weights"], held["gradients"], held["optimizer"]) == (weights, gradients, optimizer)
    assert sum(held.values()) - held["master"] == total
    assert held["master"] == optimizer / 2


def test_zero_3_keeps_the_master_shard_alone() -> None:
    """12 GB in the example, of which 2 are bf16 weights; this engine keeps the 4 of the fp32 shard in their place."""
    held = gigabytes(state(8 * 10**9, 3, EXAMPLE))
    assert held == {"weights": 0, "master": 4, "gradients": 2, "optimizer": 8}


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, {"weights": 16, "master": 32, "gradients": 32, "optimizer": 64}),
        (1, {"weights": 16, "master": 4, "gradients": 32, "optimizer": 8}),
        (2, {"weights": 16, "master": 4, "gradients": 4, "optimizer": 8}),
        (3, {"weights": 0, "master": 4, "gradients": 4, "optimizer": 8}),
    ],
)
def test_each_stage_in_the_engines_own_formats(zero: Stage, expected: dict[str, float]) -> None:
    assert gigabytes(state(8 * 10**9, zero)) == expected


@pytest.mark.parametrize(("name", "width"), [("fp32", 4), ("fp64", 8)])
def test_weights_in_the_masters_format_serve_as_master(name: str, width: int) -> None:
    totals = {}
    for zero in STAGES:
        ledger = state(800, zero, PRECISIONS[name])
        assert ledger["master"] == (100 * width if zero == 3 else 0)
        totals[zero] = ledger.total_bytes / width
    assert totals == {0: 4 * 800, 1: 2 * 800 + 200, 2: 800 + 300, 3: 400}


def test_policies_decide_and_not_the_number_of_the_stage() -> None:
    """ZeRO-1 that reduces after each microbatch keeps a gradient shard; ZeRO-3 that reduces once keeps them whole."""
    eager = zero_policy(Layout(zero=1, reduce="per_microbatch"))
    lazy = zero_policy(Layout(zero=3, gather="per_step", reduce="per_step"))
    held = [state_between_steps(bucket(800), 0, policy, PRECISIONS["bf16"]) for policy in (eager, lazy)]
    assert [ledger["gradients"] for ledger in held] == [400, 3200]
    assert [ledger["weights"] for ledger in held] == [1600, 0]


@pytest.mark.parametrize(("shard", "moments"), [(0, 16), (1, 16), (2, 8), (3, 0)])
def test_padding_is_kept_but_has_no_moments(shard: int, moments: int) -> None:
    """R66: five elements in four shards of two; the last holds only padding."""
    ledger = state(5, 1, shards=4, shard=shard)
    assert ledger.bytes == {"weights": 16, "master": 8, "gradients": 32, "optimizer": moments}


@given(st.integers(1, 5000), st.integers(1, 64), st.sampled_from(STAGES))
def test_the_shards_of_all_ranks_make_up_what_one_would_hold(numel: int, shards: int, zero: Stage) -> None:
    """The optimizer falls with the number of ranks, and holds moments of every parameter and of nothing else."""
    ledgers = [state(numel, zero, shards=shards, shard=shard) for shard in range(shards)]
    moments = [ledger["optimizer"] for ledger in ledgers]
    assert sum(moments) == 8 * numel * (1 if zero else shards)
    assert max(moments) == 8 * (-(-numel // shards) if zero else numel)


@given(st.integers(1, 5000), st.integers(1, 64))
def test_no_stage_holds_more_than_the_one_before(numel: int, shards: int) -> None:
    for shard in {0, shards - 1}:
        totals = [state(numel, zero, shards=shards, shard=shard).total_bytes for zero in STAGES]
        assert totals == sorted(totals, reverse=True)
