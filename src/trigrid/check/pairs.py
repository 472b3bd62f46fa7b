"""Few jobs that cover every pair of choices: each layout with options chosen so that any two options, and any option
and any degree, meet in a job in which both have an effect.

Greedy pairwise covering, after Cohen 1997 (the AETG system): of many random candidates the one that covers most.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Any

from trigrid.spec.job import Job
from trigrid.spec.layout import V_SHAPED, Layout
from trigrid.spec.rules import check, check_trainable

CANDIDATES = 20
# A pair that none of so many random jobs has counts as one that no job can have.
PATIENCE = 60

DEGREES = ("tp", "pp", "dp", "zero")

Choice = tuple[str, object]
Pair = tuple[Choice, Choice]

OPTIONS: Mapping[str, tuple[object, ...]] = {
    "parallel.sequence_parallel": (True, False),
    "parallel.regather": (False, True),
    "parallel.recompute": ("none", "selective", "full"),
    "parallel.schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev"),
    "parallel.virtual_stages": (1, 2),
    "parallel.gather": ("auto", "per_step"),
    "parallel.reduce": ("auto", "per_step", "per_microbatch"),
    "parallel.dp_replicate": (1, 2),
    "parallel.bucket_numel": (0, 10_000),
    "parallel.prefetch": (1, 0),
    "parallel.loss_chunks": (1, 4),
    "batch.micro_batch": (1, 3),
    "model.block": ("llama", "gpt"),
    "model.tied": (False, True),
    "model.qkv_bias": (False, True),
    "model.kv_heads": (2, 8),
    "model.vocab": (61, 64),
    "data.document_attention": (False, True),
    "optimizer.frozen": ((), ("embedding.*", "layers.1.*", "layers.3.*norm*")),
    "run.dropout": (0.0, 0.1),
    "run.attention_dropout": (0.0, 0.1),
    "run.precision": ("fp64", "fp32", "bf16"),
}
"""What may be chosen, by the key of the job; where a choice has no effect the first value stands."""

_EFFECT: Mapping[str, Callable[[Job], bool]] = {
    "parallel.sequence_parallel": lambda job: job.parallel.tp > 1,
    "parallel.regather": lambda job: job.parallel.tp > 1,
    "parallel.schedule": lambda job: job.parallel.pp > 1,
    "parallel.virtual_stages": lambda job: job.parallel.pp > 1 and job.parallel.schedule == "interleaved",
    "parallel.gather": lambda job: job.parallel.zero == 3 and job.parallel.dp_shard > 1,
    "parallel.reduce": lambda job: job.parallel.zero > 0 and job.parallel.dp_shard > 1,
    "parallel.dp_replicate": lambda job: job.parallel.dp > 1,
    "parallel.bucket_numel": lambda job: job.parallel.dp > 1,
    "parallel.prefetch": lambda job: job.parallel.zero == 3 and job.parallel.dp_shard > 1,
    "model.qkv_bias": lambda job: job.model.block == "llama",
    "model.kv_heads": lambda job: job.model.block == "llama",
}


_NEEDS: Mapping[str, Choice] = {
    "parallel.regather": ("parallel.sequence_parallel", True),
    "parallel.virtual_stages": ("parallel.schedule", "interleaved"),
}


def covering(
    base: Job, layouts: Sequence[Layout], options: Mapping[str, tuple[object, ...]] = OPTIONS, seed: int = 0
) -> list[Job]:
    """Jobs like `base`: one for each of `layouts`, in their order, and those that the missing pairs need.

    Layouts of which no choice of options is legal are left out.
    """
    random_ = random.Random(seed)
    missing = _pairs_wanted(layouts, options)
    jobs = []

    def candidate(layout: Layout, fixed: Mapping[str, object] = {}) -> Job | None:
        picked = {key: random_.choice(values) for key, values in options.items()} | dict(fixed)
        return _legal(replace(base, parallel=layout), picked, options)

    def best(candidates: Iterable[Job | None]) -> Job | None:
        legal = [job for job in candidates if job is not None]
        return max(legal, key=lambda job: len(missing & pairs(job, options)), default=None)

    def take(job: Job) -> None:
        jobs.append(job)
        missing.difference_update(pairs(job, options))

    for layout in layouts:
        if (found := best(candidate(layout) for _ in range(CANDIDATES))) is not None:
            take(found)
    for pair in sorted(missing, key=str):
        if pair not in missing:
            continue
        fixed = {key: value for key, value in pair if key in options}
        fixed |= {key: value for needs, choice in _NEEDS.items() if needs in fixed for key, value in [choice]}
        suited = [layout for layout in layouts if _may_have(_with(replace(base, parallel=layout), fixed), pair)]
        tries = (candidate(random_.choice(suited), fixed) for _ in range(PATIENCE if suited else 0))
        hits = (job for job in tries if job is not None and pair in pairs(job, options))
        if (found := best(islice(hits, CANDIDATES // 4))) is not None:
            take(found)
    return jobs


def pairs(job: Job, options: Mapping[str, tuple[object, ...]] = OPTIONS) -> set[Pair]:
    """The pairs of choices that have an effect in `job`."""
    choices = [choice for choice in choices_of(job, options) if _has_effect(job, choice[0])]
    choices += [(axis, getattr(job.parallel, axis)) for axis in DEGREES]
    return set(combinations(sorted(choices), 2))


def choices_of(job: Job, options: Mapping[str, tuple[object, ...]] = OPTIONS) -> list[Choice]:
    """(key, value in `job`) of each option."""
    return [(key, value_at(job, key)) for key in options]


def value_at(job: Job, key: str) -> object:
    """The value of `job` at a dotted key."""
    section, name = key.split(".")
    value: object = getattr(getattr(job, section), name)
    return value


def _legal(job: Job, picked: Mapping[str, object], options: Mapping[str, tuple[object, ...]]) -> Job | None:
    """`job` with the options `picked`, those without effect left at their first value; None if it cannot run."""
    job = _with(job, picked)
    idle = [key for key in options if not _has_effect(job, key)]
    job = _with(job, {key: options[key][0] for key in idle})
    # GPT blocks have as many KV heads as heads, V-shaped schedules two stages on each rank.
    if "model.kv_heads" in idle:
        job = _with(job, {"model.kv_heads": job.model.heads})
    if "parallel.virtual_stages" in idle and job.parallel.schedule in V_SHAPED:
        job = _with(job, {"parallel.virtual_stages": 2})
    return None if check(job) or check_trainable(job) else job


def _may_have(job: Job, pair: Pair) -> bool:
    """Whether both choices of `pair`, which `job` has if they are options, have an effect in it."""
    return all(getattr(job.parallel, key) == value if key in DEGREES else _has_effect(job, key) for key, value in pair)


def _has_effect(job: Job, key: str) -> bool:
    return _EFFECT[key](job) if key in _EFFECT else True


def _with(job: Job, choices: Mapping[str, object]) -> Job:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in choices.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return replace(job, **{section: replace(getattr(job, section), **new) for section, new in sections.items()})


def _pairs_wanted(layouts: Sequence[Layout], options: Mapping[str, tuple[object, ...]]) -> set[Pair]:
    """Every pair of values of different options, and every option's value with every degree and ZeRO stage."""
    values: dict[str, set[object]] = {key: set(choices) for key, choices in options.items()}
    degrees = {axis: {getattr(layout, axis) for layout in layouts} for axis in DEGREES}
    wanted = set()
    for (one, mine), (other, theirs) in combinations(sorted((values | degrees).items()), 2):
        if one in options or other in options:
            wanted |= {((one, a), (other, b)) for a in mine for b in theirs}
    return wanted
