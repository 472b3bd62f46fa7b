"""The events of a run in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trigrid.report.units import scaled, seconds

Event = Mapping[str, Any]
GOOD, PLAIN, BAD = "good", "plain", "bad"


def told(event: Event) -> dict[str, Any] | None:
    """When it was, how good it is, and what it is; None of what is not worth a line, or is not of this version."""
    weight, words = TEXTS.get(event["kind"], (PLAIN, None))
    try:
        return {"time_s": event["time_s"], "weight": weight, "words": words(event)} if words else None
    except (KeyError, TypeError, ValueError):
        return None


def _start(event: Event) -> str:
    ranks = f"{event['world']:,} ranks"
    return f"{ranks} go on after step {event['step']:,}" if event["resumed"] else f"{ranks} begin"


def _failed(event: Event) -> str:
    known = event.get("detected_s")
    after = f", known after {seconds(known)}" if known else ""
    return f"{event.get('reason') or event.get('signal') or 'the run failed'}{after}"


def _checkpoint(event: Event) -> str:
    took = f"{scaled(event['bytes'])} bytes in {seconds(event['seconds'])}"
    return f"checkpoint of step {event['step']:,}: {took}, of which training waited {seconds(event['blocked_s'])}"


def _preempted(event: Event) -> str:
    kept = "with a checkpoint" if event.get("checkpoint") else "without a checkpoint"
    return f"told to stop by {event['signal']} after step {event['step']:,}, {kept}"


TEXTS: Mapping[str, tuple[str, Callable[[Event], str]]] = {
    "start": (PLAIN, _start),
    "checkpoint": (GOOD, _checkpoint),
    "checkpoint_failed": (BAD, lambda e: f"the checkpoint of step {e['step']:,} was not written: {e['reason']}"),
    "not_finite": (BAD, lambda e: f"step {e['step']:,}: the gradient is not finite ({e['action']})"),
    "spike": (BAD, lambda e: f"step {e['step']:,}: the loss of {e['loss']:.4f} is a spike"),
    "rewind": (BAD, lambda e: f"back from step {e['from_step']:,} to step {e['to_step']:,}"),
    "hung": (BAD, lambda e: f"nothing goes on for {seconds(e['stuck_s'])} in {e['phase']}"),
    "failed": (BAD, _failed),
    "preempted": (PLAIN, _preempted),
    "end": (GOOD, lambda e: f"all {e['step']:,} steps are done"),
}
