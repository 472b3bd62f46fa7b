"""`best`: the layouts of a state with every knob open that is not locked. `smaller`: the fastest of them with less
memory. `fitting`: what would make a layout fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trigrid.plan.around import reasons
from trigrid.plan.changes import Change, changes_that_fit, nearest_batch
from trigrid.plan.found import Candidate as Priced
from trigrid.plan.found import Found
from trigrid.plan.front import smaller as next_of_front
from trigrid.plan.plan import number_format, step_for
from trigrid.plan.search import search_layouts, space_of
from trigrid.plan.software import Software
from trigrid.plan.space import Space
from trigrid.report.search import change_lines, found_text, layout_text, spare_text
from trigrid.web.questions.draft import draft, knob_key, search_of
from trigrid.web.questions.moved import Candidate, candidate, in_layout, with_value
from trigrid.web.questions.state import State

MOST = 24
"""Layouts that are told of each kind."""
LARGEST_BYTES = 2**60
"""More than any GPU has."""


@dataclass(frozen=True, kw_only=True)
class BestInput:
    """What is searched."""

    state: State
    """The page's state; of the layout only the values of `locked` keys are kept."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a knob has its value."""

    key: str
    """Its job key."""
    value: str
    """As chosen."""
    reason: str
    """What the values next to it cost, or which limit they break."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much was looked at."""

    legal: int
    """Distinct layouts."""
    priced: int
    """Whose time was computed."""
    fitting: int
    """Of those, about as fast as the best, and fitting."""
    replayed: int
    """Whose schedule was replayed."""


@dataclass(frozen=True, slots=True)
class Best:
    """What a search found."""

    state: State | None
    """In the best layout, or the one nearest to fitting; null where no layout goes with GPUs and batch."""
    fits: bool
    """Whether it fits."""
    words: str
    """The answer in a sentence."""
    how: str
    """How it was found."""
    why: list[Reason]
    """Why each knob has its value."""
    ranked: list[Candidate]
    """The fastest layouts that fit, replayed."""
    front: list[Candidate]
    """Those for which none is both as fast and as small."""
    trainable: Candidate | None
    """The fastest that `trigrid train` runs."""
    counts: Counts | None
    """How much was looked at."""
    open: list[str]
    """Keys of the knobs that were searched."""
    spare_gpus: int
    """GPUs that the best layout leaves."""
    spare: str
    """The same in a sentence, with a near global batch that would use them; empty where none is left."""
    proved: bool
    """Whether no layout that was not replayed can be faster."""


def best(asked: BestInput) -> Best:
    """The best layouts of a state. Raises Refused where what is locked makes no job."""
    search, software = search_of(asked.state)
    found = search_layouts(search.job, software, open=search.open, gpus=search.gpus)
    opened = [knob_key(knob) for knob in sorted(search.open)]
    if found is None:
        words = f"no layout of {search.gpus:,} GPUs goes with the global batch and the degrees given"
        return Best(None, False, words, "", [], [], [], None, None, opened, search.gpus, "", True)
    words, how = found_text(found)
    counts, runs = found.counts, found.trainable()
    return Best(
        state=in_layout(asked.state, found.space.job, found.chosen.setup, found.space.gpus),
        fits=bool(found.ranked),
        words=words,
        how=how,
        why=[Reason(knob_key(why.knob), why.value, why.reason) for why in reasons(found)],
        ranked=_told(asked.state, found, found.ranked[:MOST]),
        front=_told(asked.state, found, found.front[:MOST]),
        trainable=_told(asked.state, found, (runs,))[0] if runs else None,
        counts=Counts(counts.legal, counts.priced, counts.fitting, counts.replayed),
        open=opened,
        spare_gpus=found.spare_gpus,
        spare=spare_text(found, nearest_batch(found)) if found.spare_gpus else "",
        proved=found.proved,
    )


@dataclass(frozen=True, kw_only=True)
class SmallerInput:
    """What is searched."""

    state: State
    """As for `best`."""
    than_bytes: int
    """Of the fullest stage of the layout that another is to be smaller than."""
    best_s: float
    """Seconds of a step of the best layout, than which another is not to be much slower."""


@dataclass(frozen=True, slots=True)
class Smaller:
    """The next of the Pareto front."""

    layout: Candidate | None
    """The fastest that needs clearly less; null where none does, or only much slower ones."""


def smaller(asked: SmallerInput) -> Smaller:
    """The fastest layout that needs clearly less memory than another: asked again and again, the Pareto front of memory
    and throughput. Raises Refused where what is locked makes no job."""
    search, software = search_of(asked.state)
    space = space_of(search.job, software, search.open, search.gpus)
    found = next_of_front(space, software, min(asked.than_bytes, LARGEST_BYTES), asked.best_s)
    return Smaller(_candidate(asked.state, space, software, found) if found else None)


def _told(state: State, found: Found, candidates: tuple[Priced, ...]) -> list[Candidate]:
    return [_candidate(state, found.space, found.software, one) for one in candidates]


def _candidate(state: State, space: Space, software: Software, one: Priced) -> Candidate:
    job = space.job
    step = step_for(job.model, job.cluster, software, number_format(job))
    return candidate(in_layout(state, job, one.setup, space.gpus), one.setup, one.step_s, one.bytes, step)


@dataclass(frozen=True, kw_only=True)
class FittingInput:
    """What is to fit."""

    state: State
    """The page's state."""


@dataclass(frozen=True, slots=True)
class FittingChange:
    """A single change after which it fits."""

    what: str
    """The change in words."""
    layout: Candidate
    """The fastest layout then."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """What would make a layout fit."""

    fits: bool
    """Whether it does already."""
    words: str
    """The answer in a sentence."""
    nearest: Candidate | None
    """The nearest layout that fits: one knob away, else the best with all knobs open; null where none is."""
    changes: list[FittingChange]
    """Single changes of a knob, of the number of GPUs or of the accelerator."""


def fitting(asked: FittingInput) -> Fitting:
    """Single changes after which the layout of a state fits, and the nearest layout that does. Raises Refused for a
    layout that is not legal."""
    drafted = draft(asked.state)
    job, software = drafted.asked
    found = search_layouts(job, software, open=frozenset(), gpus=drafted.gpus)
    assert found is not None, "a legal layout is a space of one"
    if found.ranked:
        return Fitting(True, f"{layout_text(found.chosen.setup)} fits", None, [])
    state = replace(asked.state, gpus=drafted.gpus)
    changes = [_change(state, found, change) for change in changes_that_fit(found)]
    nearest = next(
        (one.layout for one in changes if one.layout.state.gpus == state.gpus and _same_gpu(one, state)), None
    )
    words = f"it fits with {changes[0].what}" if changes else change_lines(())[0].strip()
    if nearest is None:
        searched = best(BestInput(state=replace(state, locked=())))
        nearest = searched.ranked[0] if searched.ranked else None
        words += f"; with all knobs open: {nearest.words}" if nearest else "; nor does any layout of these GPUs fit"
    return Fitting(False, words, nearest, changes)


def _change(state: State, found: Found, change: Change) -> FittingChange:
    job = found.space.job
    if change.gpu:
        job = replace(job, cluster=replace(job.cluster, gpu=change.gpu))
        state = with_value(state, "cluster.gpu", change.gpu)
    step = step_for(job.model, job.cluster, found.software, number_format(job))
    moved = in_layout(state, job, change.setup, change.gpus or found.space.gpus)
    return FittingChange(change.what, candidate(moved, change.setup, change.step_s, change.bytes, step))


def _same_gpu(one: FittingChange, state: State) -> bool:
    return one.layout.state.values.get("cluster.gpu") == state.values.get("cluster.gpu")
