"""A split of layers over stages, before and after."""

from __future__ import annotations

from textwrap import wrap

from trigrid.plan.balance import Balance
from trigrid.report.plan import WIDTH
from trigrid.report.units import seconds


def balance_text(split: Balance) -> str:
    """The split that was found, what it gains, and how sure it is."""
    layers = split.job.parallel.stage_layers or split.before
    if split.slowest_s >= split.before_s:
        text = f"balance: stage_layers {_listed(split.before)} has the fastest slowest stage already"
    else:
        text = (
            f"balance: stage_layers {_listed(layers)} in place of {_listed(split.before)}: the slowest stage takes "
            f"{seconds(split.slowest_s)} per microbatch in place of {seconds(split.before_s)}"
        )
    if not split.proved:
        text += "; the fastest split of all does not fit, and of those that do a faster one may have been missed"
    return "\n".join(wrap(text, WIDTH - 2, subsequent_indent="  "))


def balance_json(split: Balance) -> dict[str, object]:
    """The same as data."""
    return {
        "stage_layers": list(split.job.parallel.stage_layers or split.before),
        "before": list(split.before),
        "slowest_s": split.slowest_s,
        "before_s": split.before_s,
        "proved": split.proved,
    }


def _listed(layers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, layers))}]"
