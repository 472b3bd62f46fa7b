"""Goodput for people and as JSON: of a run, and of a job that has not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from textwrap import wrap
from typing import Any

from trigrid.plan.goodput import CAUSES as EXPECTED
from trigrid.plan.goodput import (
    LLAMA3_DAYS,
    LLAMA3_GPUS,
    LLAMA3_PLANNED,
    LLAMA3_SHARE,
    LLAMA3_UNEXPECTED,
    LongRun,
    expected,
    longest_restart_s,
)
from trigrid.plan.long_run import Spread
from trigrid.report.console import duration, table
from trigrid.report.goodput import CAUSES, OPEN, Account
from trigrid.report.plan import WIDTH
from trigrid.report.prospect import Prospect
from trigrid.report.units import scaled, seconds

SCHEMA = "trigrid.report/1"
INTERVALS_S = (60.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
LONGEST_REASON = 60


def account_text(name: str, found: Account, steps: int) -> str:
    """Where the time of the run `name` of `steps` steps went, and each of its failures."""
    open_ = f" (last line {duration(found.age_s)} ago)" if found.state == OPEN else ""
    title = f"{name}: {found.steps:,} of {steps:,} steps, {found.state}{open_}; {duration(found.wall_s)} in all"
    rows = [
        [cause, f"{value:,.1f}", _share(value, found.wall_s), CAUSES[cause]]
        for cause, value in found.seconds.items()
        if value or cause == "productive"
    ]
    rows.append(["all", f"{found.wall_s:,.1f}", _share(found.wall_s, found.wall_s), "from the first to the last line"])
    lines = [title, "", *_left(["cause", "seconds", "share", "what it is"], rows), "", *wrap(_counts(found), WIDTH)]
    if found.failures:
        lines += ["", *_failures(found)]
    return "\n".join(lines)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _left(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose last column is text."""
    numbers = table(header[:-1], [row[:-1] for row in rows]).splitlines()
    return [
        f"  {line}  {text}".rstrip()
        for line, text in zip(numbers, [header[-1], *(row[-1] for row in rows)], strict=True)
    ]


def _counts(found: Account) -> str:
    text = f"{_many(found.launches, 'launch', 'launches')}, {_many(len(found.failures), 'failure')}, "
    text += f"{_many(found.checkpoints, 'complete checkpoint')}"
    if found.stall_s is not None and found.write_s is not None:
        text += f" (training stands still for {seconds(found.stall_s)}, it is safe {seconds(found.write_s)} later)"
    if found.rewinds:
        text += f", {_many(found.rewinds, 'rewind')} over {_many(found.rewound_steps, 'step')}"
    lost = [failure.lost_steps for failure in found.failures if failure.lost_steps is not None]
    if lost:
        text += f"; steps lost per failure: {fmean(lost):.1f} on average, {max(lost):,} at most"
    known = [failure.detected_s for failure in found.failures if failure.detected_s is not None]
    if known:
        text += f"; detected after {seconds(fmean(known))} on average, {seconds(max(known))} at most"
    if found.unsaved_steps:
        text += f"; {_many(found.unsaved_steps, 'step')} since the last complete checkpoint would be lost now"
    return text


def _many(count: int, one: str, more: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def _failures(found: Account) -> list[str]:
    rows = [
        [
            str(number + 1),
            duration(failure.time_s - found.begin_s),
            "-" if failure.rank is None else str(failure.rank),
            "-" if failure.detected_s is None else seconds(failure.detected_s),
            "-" if failure.lost_steps is None else f"{failure.lost_steps:,}",
            failure.reason if len(failure.reason) <= LONGEST_REASON else f"{failure.reason[: LONGEST_REASON - 1]}…",
        ]
        for number, failure in enumerate(found.failures)
    ]
    return _left(["failure", "after", "rank", "detected", "steps lost", "what"], rows)


def prospect_text(found: Prospect, spread: Spread | None = None, head: str = "expected") -> str:
    """Shares that are expected with the interval in use and the best one, played where `spread` is given, from what
    they follow, and which interval would be better."""
    run, sources = found.best, found.sources
    text = (
        f"{head} on {_many(found.gpus, 'GPU')}: a failure every {duration(run.mtbf_s)} ({sources['mtbf_s']}), "
        f"detected in {seconds(run.detect_s)} ({sources['detect_s']}), restarted in {seconds(run.restart_s)} "
        f"({sources['restart_s']}); a checkpoint stops training for {seconds(run.stall_s)} ({sources['stall_s']}) and "
        f"is safe {seconds(run.write_s)} later ({sources['write_s']}): {scaled(found.cost.bytes)} bytes from "
        f"{_many(found.cost.nodes, 'node')}; a step takes {seconds(found.step_s)} ({sources['step_s']})"
    )
    used, best = expected(found.used) if found.used else None, expected(found.best)
    header = ["cause", *(["in use"] if used else []), "best", *(["played"] if spread else [])]
    rows = [
        [
            cause,
            *([f"{used[cause]:.2%}"] if used else []),
            f"{best[cause]:.2%}",
            *([f"{spread.shares[cause]:.2%}"] if spread else []),
        ]
        for cause in EXPECTED
    ]
    shares = [f"  {line}" for line in table(header, rows).splitlines()]
    return "\n".join([*wrap(text, WIDTH, subsequent_indent="  "), "", *shares, "", *wrap(advice(found), WIDTH)])


def advice(found: Prospect) -> str:
    """The best interval against the one in use, in one sentence."""
    best = f"{_many(found.best_steps, 'step')} ({seconds(found.best.interval_s)})"
    kept = expected(found.best)["productive"]
    if found.used is None:
        text = f"no checkpoint is made (checkpoint.every = 0): a failure loses everything; best is one every {best}"
    else:
        text = (
            f"a checkpoint is made every {_many(found.every, 'step')} ({seconds(found.every * found.step_s)}); "
            f"best is one every {best}, with which {kept:.2%} of the time counts instead of {kept - found.gain:.2%}"
        )
    if found.best_steps >= found.steps:
        text += f" (all of the run's {_many(found.steps, 'step')} come before that, and the last makes one)"
    return text


def spread_text(run: LongRun, spread: Spread, days: float, seed: int, shape: float) -> str:
    """What was played, and with which restart this cluster has the share that Llama 3 had."""
    law = "exponential" if shape == 1 else f"Weibull of shape {shape:g}"
    played = (
        f"played: {_many(spread.runs, 'run')} of {days:g} days with {spread.failures:,.1f} failures on average "
        f"({law}, seed {seed}): {spread.mean:.2%} productive, 5 to 95 % of runs {spread.p5:.2%} to {spread.p95:.2%}; "
        f"the closed form says {expected(run)['productive']:.2%}"
    )
    share = LLAMA3_SHARE
    rows = []
    for interval_s in sorted({*INTERVALS_S, run.interval_s}):
        if interval_s >= run.write_s:
            at = LongRun(**{**asdict(run), "interval_s": interval_s})
            longest = longest_restart_s(at, share)
            limit = seconds(longest) if longest >= 0 else "none"
            rows.append([duration(interval_s), f"{expected(at)['productive']:.2%}", limit])
    lines = table(["checkpoint every", "productive", f"longest restart for {share:.0%}"], rows).splitlines()
    source = (
        f"Llama 3 405B had more than {share:.0%} with {LLAMA3_UNEXPECTED} unexpected and {LLAMA3_PLANNED} planned "
        f"interruptions in {LLAMA3_DAYS} days on {LLAMA3_GPUS:,} GPUs."
    )
    return "\n".join([*wrap(played, WIDTH, subsequent_indent="  "), "", *(f"  {line}" for line in lines), "", source])


def account_json(found: Account, steps: int) -> dict[str, Any]:
    """The account by the contract `trigrid.report/1`: what is here stays, more may come."""
    lost = [failure.lost_steps for failure in found.failures if failure.lost_steps is not None]
    known = [failure.detected_s for failure in found.failures if failure.detected_s is not None]
    return {
        "schema": SCHEMA,
        **{name: value for name, value in asdict(found).items() if name not in ("failures", "seconds")},
        "planned_steps": steps,
        "productive_share": found.productive_share,
        "seconds": dict(found.seconds),
        "failures": [asdict(failure) for failure in found.failures],
        "lost_steps": {"mean": fmean(lost), "max": max(lost)} if lost else None,
        "detected_s": {"mean": fmean(known), "max": max(known)} if known else None,
    }


def prospect_json(found: Prospect) -> dict[str, Any]:
    def told(run: LongRun, steps: int) -> dict[str, Any]:
        return {"steps": steps, **asdict(run), "shares": dict(expected(run))}

    return {
        "gpus": found.gpus,
        "step_s": found.step_s,
        "used": told(found.used, found.every) if found.used else None,
        "best": told(found.best, found.best_steps),
        "checkpoint": asdict(found.cost),
        "sources": dict(found.sources),
        "advice": advice(found),
    }


def spread_json(spread: Spread, days: float, seed: int, shape: float) -> dict[str, Any]:
    return {**asdict(spread), "shares": dict(spread.shares), "days": days, "seed": seed, "shape": shape}
