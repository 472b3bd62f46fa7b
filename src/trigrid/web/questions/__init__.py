"""What the page asks, and the answers: the standard library and trigrid only, so the same code answers in a browser.

    answer("plan", {"state": {"model": "llama3-8b", "gpus": 8}})

state.py      the page's state; link.py: as a URL and a command line; draft.py: as a job
limits.py     how large a question may be
dials.py      which dials there are; controls.py: what each may be set to, and why not to another value
planning.py   plan: all that a turn of a dial asks for; shapes.py: its model
playing.py    timeline
explaining.py explain; comparing.py: measured, compare; labels.py: names of figures
best.py       best, smaller, fitting; neighbours.py: sensitivity, zero; moved.py: states a step away
cluster.py    where the layout sits, and the golden rules
files.py      job, json, trace, export
catalogue.py  models, accelerators, software and policies; presets.py: published runs
reading.py    JSON as dataclasses; answers.py: dataclasses as JSON
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trigrid.errors import Problem, Refused
from trigrid.web.questions.answers import Refusal, plain, problem
from trigrid.web.questions.best import (
    Best,
    BestInput,
    Fitting,
    FittingInput,
    Smaller,
    SmallerInput,
    best,
    fitting,
    smaller,
)
from trigrid.web.questions.catalogue import Catalogue, CatalogueInput, catalogue
from trigrid.web.questions.cluster import ClusterInput, Picture, cluster
from trigrid.web.questions.comparing import CompareInput, Comparison, Measured, MeasuredInput, compare, measured
from trigrid.web.questions.explaining import ExplainInput, Explanation, explain
from trigrid.web.questions.files import (
    ExportInput,
    File,
    JobInput,
    PlanFileInput,
    TraceInput,
    export,
    job,
    plan_file,
    trace,
)
from trigrid.web.questions.link import Link, LinkInput, link
from trigrid.web.questions.neighbours import Sensitivity, SensitivityInput, Zero, ZeroInput, sensitivity, zero
from trigrid.web.questions.planning import PlanAnswer, PlanInput, plan
from trigrid.web.questions.playing import TimelineAnswer, TimelineInput, timeline
from trigrid.web.questions.presets import Presets, PresetsInput, presets
from trigrid.web.questions.reading import parse, read

__all__ = ["QUESTIONS", "Question", "answer", "refusal", "reply"]


@dataclass(frozen=True)
class Question:
    """answer: from `input` to `output`, both dataclasses. slow: whether it takes many plans, or long, and is to be
    asked beside the others, which a turn of a dial waits for."""

    name: str
    answer: Callable[[Any], Any]
    input: type
    output: type
    slow: bool = False


QUESTIONS: Mapping[str, Question] = MappingProxyType(
    {
        question.name: question
        for question in (
            Question("plan", plan, PlanInput, PlanAnswer),
            Question("timeline", timeline, TimelineInput, TimelineAnswer),
            Question("explain", explain, ExplainInput, Explanation),
            Question("measured", measured, MeasuredInput, Measured),
            Question("zero", zero, ZeroInput, Zero),
            Question("sensitivity", sensitivity, SensitivityInput, Sensitivity, slow=True),
            Question("cluster", cluster, ClusterInput, Picture),
            Question("compare", compare, CompareInput, Comparison),
            Question("best", best, BestInput, Best, slow=True),
            Question("smaller", smaller, SmallerInput, Smaller, slow=True),
            Question("fitting", fitting, FittingInput, Fitting, slow=True),
            Question("link", link, LinkInput, Link),
            Question("catalogue", catalogue, CatalogueInput, Catalogue),
            Question("presets", presets, PresetsInput, Presets, slow=True),
            Question("job", job, JobInput, File),
            Question("json", plan_file, PlanFileInput, File),
            Question("trace", trace, TraceInput, File, slow=True),
            Question("export", export, ExportInput, File),
        )
    }
)


def answer(name: str, body: object) -> dict[str, Any]:
    """The answer to question `name` as plain values, from a `body` of plain values. Raises Refused."""
    if name not in QUESTIONS:
        raise Refused([Problem("question", name, "there is no such question", tuple(QUESTIONS))])
    question = QUESTIONS[name]
    found: dict[str, Any] = plain(question.answer(read(question.input, body)))
    return found


def refusal(refused: Refused) -> dict[str, Any]:
    """The problems of a refusal as plain values: what a question has in place of an answer."""
    found: dict[str, Any] = plain(Refusal([problem(told) for told in refused.problems]))
    return found


def reply(name: str, body: str) -> tuple[bool, str]:
    """Whether question `name` has an answer to a body that is JSON text, and that or the problems as JSON text."""
    try:
        found, sound = answer(name, parse(body)), True
    except Refused as refused:
        found, sound = refusal(refused), False
    return sound, json.dumps(found, allow_nan=False, separators=(",", ":"))
