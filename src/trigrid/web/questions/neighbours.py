"""`sensitivity`: each knob one notch up and down. `zero`: the ZeRO stages side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trigrid.errors import Refused
from trigrid.job.sources import value_of
from trigrid.plan.around import Around, Move
from trigrid.plan.around import sensitivity as notches
from trigrid.plan.plan import judged, make_plan
from trigrid.plan.software import POLICIES
from trigrid.plan.space import KNOBS
from trigrid.report.plan import headline
from trigrid.report.units import gib, seconds
from trigrid.spec.job import Job
from trigrid.web.questions.answers import written
from trigrid.web.questions.catalogue import PolicyBytes, policy_bytes
from trigrid.web.questions.dials import DIALS
from trigrid.web.questions.draft import Draft, draft, knob_key
from trigrid.web.questions.limits import actions
from trigrid.web.questions.moved import in_layout, with_value
from trigrid.web.questions.moves import Moves, get
from trigrid.web.questions.state import State

MOST_ACTIONS = 5_000
"""Of a schedule whose neighbours are all replayed."""
SURROUNDINGS = {
    **{name: f"batch.{name}" for name in ("global_batch", "sequence")},
    **{name: f"cluster.{name}" for name in ("nic_gbit", "nvlink_gb_s", "oversubscription", "gpu")},
    **{name: f"parallel.{name}" for name in ("regather", "loss_chunks")},
    **{knob: knob_key(knob) for knob in KNOBS},
}


@dataclass(frozen=True, kw_only=True)
class SensitivityInput:
    """Around what."""

    state: State
    """The page's state."""


@dataclass(frozen=True, slots=True)
class Notch:
    """A knob at another value, all others as they are."""

    key: str
    """Its job key."""
    label: str
    """Its name for people."""
    value: str
    """As it is."""
    to: str
    """As it would be."""
    legal: bool
    """Whether it may be."""
    reason: str
    """Why not."""
    state: State | None
    """The page's state with it; null where it is not legal."""
    step_s: float | None
    """Seconds of a step then."""
    step_change: float | None
    """As a share of the step as it is."""
    total_bytes: int | None
    """Of the fullest stage then."""
    bytes_change: int | None
    """Against the fullest stage as it is."""
    verdict: str
    """Whether it fits then."""
    words: str
    """The same in a sentence."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Each knob one notch away."""

    rows: list[Notch]
    """Knobs of the layout, then of batch and cluster."""
    words: str
    """Why there are none; else empty."""


def sensitivity(asked: SensitivityInput) -> Sensitivity:
    """Each knob one notch up and down. Raises Refused for a layout that is not legal."""
    drafted = draft(asked.state)
    job, software = drafted.asked
    if job.parallel.schedule == "auto":
        return Sensitivity([], "neighbours of a layout are priced with named schedules only")
    if (many := actions(job)) > MOST_ACTIONS:
        why = f"a schedule of {many:,} actions is too long to replay for each neighbour here"
        return Sensitivity([], f"{why}; `trigrid plan … --sensitivity` does")
    around, moves = notches(job, software, drafted.gpus)
    state = replace(asked.state, gpus=drafted.gpus)
    return Sensitivity([_notch(state, job, around, move) for move in moves], "")


def _notch(state: State, job: Job, around: Around, move: Move) -> Notch:
    key, here = SURROUNDINGS[move.knob], around.here
    label = next((dial.label for dial in DIALS if dial.key == key), key)
    before = written(get(job, key))
    if move.knob in ("gather", "reduce") and before == "auto":
        before = ""
    if move.price is None:
        words = f"{label} {move.value} is not legal: {move.illegal}"
        return Notch(key, label, before, move.value, False, move.illegal, None, None, None, None, None, "", words)
    step_s, total = move.price.step_s, round(move.price.bytes)
    change, more = step_s / here.step_s - 1, total - round(here.bytes)
    verdict = judged(total, int(around.ceiling), around.step.machine.values["interval.memory"])[1]
    if move.knob in KNOBS:
        moved = in_layout(state, job, move.price.setup, around.gpus)
    else:
        moved = with_value(state, key, value_of(tuple(key.split(".")), move.value))
    words = f"{label} {move.value}: step {seconds(step_s)} ({change:+.1%}), {gib(total)} GiB ({gib(more)}), {verdict}"
    return Notch(key, label, before, move.value, True, "", moved, step_s, change, total, more, verdict, words)


@dataclass(frozen=True, kw_only=True)
class ZeroInput:
    """Of what."""

    state: State
    """The page's state."""


@dataclass(frozen=True, slots=True)
class ZeroStage:
    """The layout with one ZeRO stage."""

    zero: int
    """0 shards nothing, 1 the optimizer, 2 also the gradients, 3 also the weights."""
    legal: bool
    """Whether the rest goes with it."""
    reason: str
    """Why not."""
    state: State
    """The page's state with it."""
    by_category: dict[str, int]
    """Bytes of the fullest stage."""
    total_bytes: int
    """Their sum, as the device sees it."""
    bytes_per_parameter: float
    """State of the fullest stage for each of the parameters that it computes with."""
    verdict: str
    """Whether it fits."""
    step_s: float | None
    """Seconds of a step."""
    words: str
    """The same in a sentence."""


@dataclass(frozen=True, slots=True)
class Zero:
    """The four ZeRO stages side by side."""

    policy: PolicyBytes
    """Bytes per parameter before anything is sharded."""
    stages: list[ZeroStage]
    """0 to 3."""
    policies: list[PolicyBytes]
    """Those that a state may name."""


def zero(asked: ZeroInput) -> Zero:
    """The layout of a state in every ZeRO stage. Raises Refused where not even a model is described."""
    drafted = draft(asked.state)
    policies = [policy_bytes(policy) for policy in POLICIES.values()]
    return Zero(policy_bytes(drafted.software.policy), [_stage(drafted, stage) for stage in range(4)], policies)


def _stage(drafted: Draft, stage: int) -> ZeroStage:
    choice = Moves(drafted).choice("parallel.zero", stage)
    state = with_value(drafted.state, "parallel.zero", stage)
    for key, value in choice.also.items():
        state = with_value(state, key, value)
    try:
        moved = draft(state)
        plan = make_plan(*moved.asked)
    except Refused as refused:
        told = refused.problems[0]
        return ZeroStage(stage, False, f"{told.key} = {told.value}: {told.reason}", state, {}, 0, 0.0, "", None, "")
    fullest = plan.fullest
    use = fullest.memory.use
    each = sum(use.state) / use.parameters
    words = f"ZeRO-{stage}: {headline(plan)}, {gib(fullest.memory.total_bytes)} GiB, step {seconds(plan.step_s.best)}"
    return ZeroStage(
        zero=stage,
        legal=True,
        reason="",
        state=state,
        by_category=dict(fullest.memory.ledger.bytes),
        total_bytes=fullest.memory.total_bytes,
        bytes_per_parameter=each,
        verdict=fullest.verdict,
        step_s=plan.step_s.best,
        words=words,
    )
