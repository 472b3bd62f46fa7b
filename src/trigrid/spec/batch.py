"""The batch equation: what is missing of its four numbers follows from the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trigrid.errors import Problem

EQUATION = "global_batch = dp · micro_batch · accumulation"
NOT_GIVEN = "(not given)"


@dataclass(frozen=True, kw_only=True)
class BatchNumbers:
    """global_batch and micro_batch in sequences, dp in ranks, accumulation in microbatches of a rank and step."""

    global_batch: int
    dp: int
    micro_batch: int
    accumulation: int


def solve_batch(
    *,
    global_batch: int | None = None,
    dp: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
) -> BatchNumbers | Problem:
    """The four numbers from those given, all above 0; or why the equation cannot hold, with the nearest that let it.

    What is neither given nor determined is 1: first micro_batch, then dp.
    """
    if global_batch is None and accumulation is None:
        return Problem("batch.global_batch", NOT_GIVEN, f"needed, or batch.accumulation: {EQUATION}")
    if micro_batch is None and None in (global_batch, dp, accumulation):
        micro_batch = 1
    if dp is None and None in (global_batch, accumulation):
        dp = 1
    given = {"dp": dp or 0, "micro_batch": micro_batch or 0, "accumulation": accumulation or 0}
    solved = 0
    unknown = next((name for name, value in given.items() if not value), None)
    known = (dp or 1) * (micro_batch or 1) * (accumulation or 1)
    if global_batch is None:
        global_batch = known
    elif unknown:
        solved, left = divmod(global_batch, known)
        if left or not solved:
            below = global_batch - left
            legal = tuple(n for n in (below, below + known) if n)
            reason = f"{_filled(given)} must hold for a whole {unknown}"
            return Problem("batch.global_batch", global_batch, reason, legal)
    elif global_batch != known:
        # The global batch decides what is learnt, accumulation only how: it is the one to change where that helps.
        right, left = divmod(global_batch, given["dp"] * given["micro_batch"])
        filled = f"{_filled(given)} = {known}"
        if left:
            return Problem("batch.global_batch", global_batch, f"{filled} must hold", (known,))
        reason = f"{filled}, but batch.global_batch = {global_batch}"
        return Problem("batch.accumulation", given["accumulation"], reason, (right,))
    return BatchNumbers(global_batch=global_batch, **{name: value or solved for name, value in given.items()})


def _filled(given: Mapping[str, int]) -> str:
    """The equation with what is given."""
    return f"{EQUATION} = {' · '.join(str(value or name) for name, value in given.items())}"
