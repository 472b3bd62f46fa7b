"""From a state to the job that it describes, with every reason why that is not to be planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trigrid.errors import Problem, Refused
from trigrid.job.ask import LARGEST_CLUSTER, Asked, fill_in, searched
from trigrid.job.building import build
from trigrid.job.keys import Key, Table
from trigrid.job.sources import Document, Given, read_sources, shown
from trigrid.plan.auto import named_job
from trigrid.plan.figures import TOKENS
from trigrid.plan.layouts import neutral
from trigrid.plan.plan import Plan, make_plan, number_format
from trigrid.plan.setup import Setup
from trigrid.plan.shape import RULE, read_size
from trigrid.plan.software import SOFTWARE, Software, choose_software
from trigrid.plan.space import KNOBS, Space
from trigrid.spec.batch import NOT_GIVEN
from trigrid.spec.gpu import load_gpu
from trigrid.spec.job import Job
from trigrid.spec.rules import check_layout, check_singly, check_together
from trigrid.web.questions.limits import MOST_TOKENS, too_large, too_long
from trigrid.web.questions.state import State, Value, model_of

FILES = (("model", "config"), ("parallel", "schedule_file"), ("cluster", "calibration"))
"""Keys that name files, of which a state opens none."""
DP = frozenset({"dp"})
T = TypeVar("T")


@dataclass(frozen=True)
class Draft:
    """What a state describes. job: of sound values, some of them defaults where there are `problems`; gpus: to use at
    most. given_dp: whether dp is given and not what is left of the GPUs. assumed: in sentences."""

    state: State
    job: Job
    software: Software
    gpus: int
    tokens: float
    given_dp: bool
    assumed: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def asked(self) -> tuple[Job, Software]:
        """The job and who trains it. Raises Refused with every problem."""
        if self.problems:
            raise Refused(self.problems)
        return self.job, self.software

    @property
    def plan(self) -> Plan:
        """The plan. Raises Refused with every problem."""
        return make_plan(*self.asked)


def draft(state: State) -> Draft:
    """What `state` describes, in the layout that it gives and the dp that the GPUs leave. Raises Refused where not even
    a model is described, or where keys name files."""
    given, base, assumed = _given(state)
    problems = list(given.problems)
    job = _sound(given.tree, base, problems)
    stated = frozenset(given.tree["parallel"])
    # A state says all that it means of pp, which `neutral` would take from stages that are given one by one.
    job = replace(job, parallel=neutral(job.parallel, stated | {"pp"}))
    gpus = _gpus(state, problems)
    if "dp" not in stated:
        job = with_dp(job, gpus or job.parallel.tp * job.parallel.pp * job.parallel.cp)
    gpus = gpus or job.parallel.world
    software = _software(job, state, problems)
    tokens = _tokens(state.tokens, problems)
    if not problems:
        problems += broken(job, gpus) or check_together(job)
    return Draft(state, job, software, gpus, tokens, "dp" in stated, assumed, tuple(problems))


def search_of(state: State) -> tuple[Asked, Software]:
    """The search that `state` asks for: what is not locked of the layout is open. Raises Refused with every problem."""
    given, _, assumed = _given(state)
    keys = tuple(map(knob_key, KNOBS))
    if strange := [key for key in state.locked if key not in keys]:
        raise Refused([Problem("locked", strange[0], "no knob of a search has this key", keys)])
    for key in keys:
        table, name = key.split(".")
        if key not in state.locked:
            given.tree[table].pop(name, None)
    # Both are by stage, of which there will be others.
    given.tree["parallel"].pop("stage_layers", None)
    if given.problems:
        raise Refused(given.problems)
    if state.gpus is None:
        raise Refused([Problem("gpus", NOT_GIVEN, "is needed where a layout is searched")])
    asked = searched(given, Path(), state.gpus, assumed)
    asked = replace(asked, job=named_job(asked.job))
    if problems := tuple(too_large(asked.job)):
        raise Refused(problems)
    return asked, choose_software(asked.job, state.software, state.policy, state.expandable_segments)


def knob_key(knob: str) -> str:
    """The job key of a knob of KNOBS."""
    return f"{'batch' if knob == 'micro_batch' else 'parallel'}.{knob}"


def with_dp(job: Job, gpus: int) -> Job:
    """`job` with the dp that a search would give it on `gpus` GPUs; the least possible where there is none."""
    layout = job.parallel
    found = Space(job, DP, gpus, Setup()).data_parallel(layout.tp * layout.pp * layout.cp) or layout.dp_replicate
    return job if found == layout.dp else changed(job, "parallel", changed(layout, "dp", found))


def changed(table: T, name: str, value: object) -> T:
    """A copy of a frozen dataclass with another value of a field: as `replace`, at a tenth of its time, since an answer
    makes hundreds."""
    found: T = object.__new__(type(table))
    vars(found).update(vars(table))
    vars(found)[name] = value
    return found


def broken(job: Job, gpus: int) -> list[Problem]:
    """Why the model, batch and layout of `job`, each of whose fields is sound, are not to be planned on `gpus` GPUs."""
    layout, found = job.parallel, check_layout(job)
    if layout.world > gpus:
        product = f"tp · pp · cp · dp = {layout.tp} · {layout.pp} · {layout.cp} · {layout.dp} = {layout.world:,}"
        found.insert(0, Problem("gpus", gpus, f"{product} must not exceed it", (layout.world,)))
    return found or list(too_large(job))


def _given(state: State) -> tuple[Given, Table, tuple[str, ...]]:
    """The state's tables with what a plan needs besides, the model's alone, and what was assumed."""
    spec, base = model_of(state)
    if long := tuple(too_long(state.values)):
        raise Refused(long)
    tree = _nested(state.values)
    for section, name in FILES:
        inner = tree.get(section)
        if isinstance(inner, dict) and inner.get(name):
            reason = "names a file, and this page opens none; the command line does"
            raise Refused([Problem(f"{section}.{name}", shown(inner[name]), reason)])
    own = tree.get("model", {})
    for name, value in own.items() if isinstance(own, dict) else ():
        merged = base.get(name)
        own[name] = {**merged, **value} if isinstance(merged, dict) and isinstance(value, dict) else value
    tree["model"] = {**base, **own} if isinstance(own, dict) else own
    given = read_sources(Document(tree, {(): ""}), (), {})
    problems = list(given.problems)
    if "accumulation" in given.tree["batch"]:
        reason = "follows from batch.global_batch, parallel.dp and batch.micro_batch"
        problems.append(Problem("batch.accumulation", shown(given.tree["batch"].pop("accumulation")), reason))
    assumed = fill_in(given.tree, spec.context)
    return replace(given, problems=tuple(problems)), base, (*((RULE,) if state.params else ()), *assumed)


def _nested(values: Mapping[str, Value]) -> Table:
    """Dotted keys as tables in tables. Raises Refused where a key is a value and a table at once."""
    tree: Table = {}
    for dotted, value in values.items():
        *tables, name = dotted.split(".")
        inner: Any = tree
        for table in tables:
            inner = inner.setdefault(table, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or name in inner:
            raise Refused([Problem(dotted, shown(value), "another key has a value in its place")])
        inner[name] = value
    return tree


def _sound(tree: Table, base: Table, problems: list[Problem]) -> Job:
    """The job of `tree`, with defaults in place of what is wrong by itself, which is added to `problems`."""

    def report(key: Key, reason: str) -> None:
        value: Any = tree
        for name in key:
            value = value.get(name, NOT_GIVEN) if isinstance(value, dict) else NOT_GIVEN
        problems.append(Problem(".".join(key), shown(value), reason))

    told = len(problems)
    job: Job | None = build(Job, tree, report)
    if job is not None:
        problems += check_singly(job)
    wrong = {tuple(problem.key.split(".")[:2]) for problem in problems[told:]}
    if not wrong:
        assert job is not None
        return job
    _take_out(tree, wrong, base)
    return _sound(tree, base, problems)


def _take_out(tree: Table, wrong: Iterable[tuple[str, ...]], base: Table) -> None:
    for section, *names in wrong:
        for name in names:
            tree[section].pop(name, None)
            if section == "model" and name in base:
                tree[section][name] = base[name]
    fill_in(tree, tree["model"]["context"])


def _gpus(state: State, problems: list[Problem]) -> int | None:
    if state.gpus is None or 1 <= state.gpus <= LARGEST_CLUSTER:
        return state.gpus
    nearest = min(max(state.gpus, 1), LARGEST_CLUSTER)
    problems.append(Problem("gpus", shown(state.gpus), f"must be from 1 to {LARGEST_CLUSTER:,}", (nearest,)))
    return nearest


def _software(job: Job, state: State, problems: list[Problem]) -> Software:
    try:
        load_gpu(job.cluster.gpu)
        number_format(job)
        return choose_software(job, state.software, state.policy, state.expandable_segments)
    except Refused as refused:
        problems += refused.problems
        return SOFTWARE["trigrid"]


def _tokens(text: str, problems: list[Problem]) -> float:
    try:
        tokens = read_size(text, "tokens")
    except Refused as refused:
        problems += refused.problems
        return TOKENS
    if tokens > MOST_TOKENS:
        problems.append(Problem("tokens", text, f"are more than the {MOST_TOKENS:g} that this page plans"))
        return TOKENS
    return tokens
