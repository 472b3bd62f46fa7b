"""Which parameters of a job are not trained, and what kinds of units that makes of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby

from trigrid.blueprint.decoder import Unit, block_kinds, decoder, decoder_units
from trigrid.errors import Problem
from trigrid.spec.job import Job
from trigrid.spec.model import ModelSpec

Patterns = tuple[str, ...]
"""Those of `optimizer.frozen`."""


def frozen_parameters(job: Job) -> frozenset[str]:
    """Names of the parameters that the patterns of `optimizer.frozen` mean."""
    patterns = job.optimizer.frozen
    names = decoder(job.model).parameters if patterns else ()
    return frozenset(name for name in names if _means(patterns, name))


def _means(patterns: Patterns, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Kinds:
    """The kinds of units of a model where some parameters are frozen: units of a kind are alike in what is.

    blocks: (kind, number) of neighbours that are alike, in the order of the layers; units: one of each kind, the ends
    too; frozen: roles of what is not trained in it. A kind of block of which there are several has a number behind its
    name: llama#1.
    """

    blocks: tuple[tuple[str, int], ...]
    units: Mapping[str, Unit]
    frozen: Mapping[str, frozenset[str]]


@lru_cache(maxsize=64)
def kinds_of(spec: ModelSpec, patterns: Patterns) -> Kinds:
    """The kinds of `spec` where `patterns` are frozen."""
    if not patterns:
        units: dict[str, Unit] = {unit.kind: unit for unit in decoder_units(spec)}
        return Kinds(block_kinds(spec), units, dict.fromkeys(units, frozenset()))
    names: dict[tuple[str, frozenset[str]], str] = {}
    placed = []
    for unit in decoder(spec).units:
        still = frozenset(p.role for p in unit.parameters if _means(patterns, p.name))
        number = sum(kind == unit.kind for kind, _ in names)
        name = names.setdefault((unit.kind, still), f"{unit.kind}#{number}" if number else unit.kind)
        placed.append((name, unit, still))
    runs = groupby(name for name, _, _ in placed[1:-1])
    return Kinds(
        tuple((name, len(list(alike))) for name, alike in runs),
        {name: unit for name, unit, _ in reversed(placed)},
        {name: still for name, _, still in placed},
    )


def plain(kind: str) -> str:
    """A kind of units without its number."""
    return kind.partition("#")[0]


def entered_again(trained: Collection[str]) -> int:
    """Regions of a block whose input backward gathers once more, for gradients of the weights that are trained."""
    return sum(any(role in trained for role in layers) for layers in (("q", "k", "v"), ("gate", "up")))


def check_frozen(job: Job) -> list[Problem]:
    """Every reason why `optimizer.frozen` makes no sense for the model of `job`."""
    patterns = job.optimizer.frozen
    if not patterns:
        return []
    names = decoder(job.model).parameters
    problems = [
        Problem(
            "optimizer.frozen",
            pattern,
            "is the name of no parameter of the model",
            tuple(get_close_matches(pattern, names, n=3, cutoff=0.3)),
        )
        for pattern in patterns
        if not any(_means((pattern,), name) for name in names)
    ]
    if len(frozen_parameters(job)) == len(names):
        problems.append(Problem("optimizer.frozen", list(patterns), "leaves no parameter to train"))
    return problems
