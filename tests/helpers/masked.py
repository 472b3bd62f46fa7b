"""Batches whose ignored labels lie where means of means go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from trigrid.check import parity
from trigrid.spec.job import Job

MASKS = ("a microbatch almost", "a microbatch", "a rank", "everything")


@contextmanager
def masked(what: str, *others: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """`parity.batch` with all labels, but those of `what`, one of MASKS; within `others`, too."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(parity, "batch", lambda job, step: _batch(job, step, what)))
        for other in others:
            stack.enter_context(other())
        yield


def _batch(job: Job, step: int, what: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = job.batch.global_batch
    drawn = torch.randint(0, job.model.vocab, (rows, job.batch.sequence + 1), generator=generator)
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].clone()
    match what:
        case "a microbatch almost":
            first = labels[: job.batch.micro_batch].view(-1)
            first[torch.randperm(first.numel(), generator=generator)[: round(0.9 * first.numel())]] = -100
        case "a microbatch":
            labels[: job.batch.micro_batch] = -100
        case "a rank":
            labels[: rows // job.parallel.dp] = -100
        case "everything":
            labels[:] = -100
        case _:
            raise ValueError(what)
    return tokens, labels
