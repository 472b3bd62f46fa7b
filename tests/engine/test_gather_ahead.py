"""The order in which a stage gathers, computes, gives up and reduces."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.jobs import named, small_job

from trigrid.check.parity import batch, share
from trigrid.check.pool import Pool
from trigrid.engine.comm import Comm
from trigrid.grid import grid_of
from trigrid.models.build import build_engine


def events(ahead: int) -> list[tuple[str, str]]:
    """(what, unit) of a step of one microbatch under ZeRO-3, where what is "gather" or "run"."""
    job = small_job(named("dp1", zero=3, prefetch=ahead))
    engine = build_engine(job, Comm(grid_of(job), 0), torch.device("cpu"))
    seen: list[tuple[str, str]] = []

    def gather(bucket: Any, original: Any) -> None:
        if bucket.weights is None and bucket._gathering is None:
            seen.append(("gather", bucket.layout.name))
        original()

    for bucket in engine.buckets.values():
        bucket.open_start = partial(gather, bucket, bucket.open_start)  # type: ignore[method-assign]

    def run(name: str, original: Any, *arguments: Any) -> Any:
        seen.append(("run", name))
        return original(*arguments)

    for unit in engine.stages[0].units:
        unit.forward = partial(run, unit.name, unit.forward)  # type: ignore[method-assign]
        unit.backward = partial(run, unit.name, unit.backward)  # type: ignore[method-assign]
    tokens, labels = (share(rows, job, 0)[:1] for rows in batch(job, 0))
    engine.step(tokens, labels, 1e-3)
    return seen


@pytest.mark.parametrize("ahead", [0, 1, 2, 20])
def test_so_many_units_are_gathered_ahead(ahead: int) -> None:
    """Each unit is gathered once for its forward and once for its backward, `ahead` units before it runs."""
    seen = events(ahead)
    order = [name for what, name in seen if what == "run"]
    units = order[: len(order) // 2]
    assert order == units + units[::-1]
    assert [name for what, name in seen if what == "gather"] == order
    for direction in (seen[: len(seen) // 2], seen[len(seen) // 2 :]):
        begun = 0
        for place, (what, _) in enumerate(direction):
            if what == "gather":
                begun += 1
            else:
                done = sum(earlier == "run" for earlier, _ in direction[:place])
                assert begun == min(done + 1 + ahead, len(units))


def reductions(rank: int, zero: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The names of this rank's units, and (what, unit) of two microbatches, where what is "run" (backward), "begin" or
    "end" (reduction)."""
    job = small_job(named("dp2", zero=zero))
    engine = build_engine(job, Comm(grid_of(job), rank), torch.device("cpu"))
    seen: list[tuple[str, str]] = []

    def run(name: str, original: Any, *arguments: Any) -> Any:
        seen.append(("run", name))
        return original(*arguments)

    def close(bucket: Any, original: Any) -> None:
        original()
        pending, name = bucket._reducing, bucket.layout.name
        seen.append(("begin", name))
        pending.wait = partial(end, name, pending.wait)

    def end(name: str, original: Any) -> Any:
        seen.append(("end", name))
        return original()

    for bucket in engine.buckets.values():
        bucket.close_gradients = partial(close, bucket, bucket.close_gradients)  # type: ignore[method-assign]
    for unit in engine.stages[0].units:
        unit.backward = partial(run, unit.name, unit.backward)  # type: ignore[method-assign]
    tokens, labels = (share(rows, job, rank)[:2] for rows in batch(job, 0))
    engine.step(tokens, labels, 1e-3)
    return [unit.name for unit in engine.stages[0].units], seen


@pytest.mark.parametrize("zero", [2, 3])
def test_a_unit_is_reduced_while_the_next_computes(pool: Pool, zero: int) -> None:
    """And one reduction is over before the next begins, so that the gradients of two units are there at most."""
    for units, seen in pool.run(reductions, 2, zero):
        order = units[::-1] * 2
        expected = [("run", order[0]), ("begin", order[0])]
        for before, unit in pairwise(order):
            expected += [("run", unit), ("end", before), ("begin", unit)]
        assert seen == [*expected, ("end", order[-1])]
