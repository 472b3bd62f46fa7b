"""Which parameters of a job are not trained."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase

from trigrid.blueprint.decoder import decoder
from trigrid.errors import Problem
from trigrid.spec.job import Job


def frozen_parameters(job: Job) -> frozenset[str]:
    """Names of the parameters that the patterns of `optimizer.frozen` mean."""
    patterns = job.optimizer.frozen
    names = decoder(job.model).parameters if patterns else ()
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


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
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if len(frozen_parameters(job)) == len(names):
        problems.append(Problem("optimizer.frozen", list(patterns), "leaves no parameter to train"))
    return problems
