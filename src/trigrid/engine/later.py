"""The queue of weight gradients: what a backward of the input alone puts off, for the schedules that split backwards
(Qi 2023).

An input backward runs the graph once, and each product in it leaves its input and the gradient of its output here; the
weight backward multiplies the two. So no product is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class PutOff(NamedTuple):
    """Products of one input with several weights whose gradients are still to be computed.

    x: kept until then; whole: from x to the input that the products had, which may have to be gathered; grads: of the
    outputs.
    """

    weights: tuple[Tensor, ...]
    x: Tensor
    whole: Callable[[Tensor], Tensor]
    grads: tuple[Tensor, ...]


class WeightQueue:
    """Where products put off the gradients of their weights while somebody collects them."""

    def __init__(self) -> None:
        self._collected: list[PutOff] | None = None

    @property
    def collecting(self) -> bool:
        return self._collected is not None

    @contextmanager
    def collect(self) -> Iterator[list[PutOff]]:
        """What is put off meanwhile."""
        assert self._collected is None
        self._collected = []
        try:
            yield self._collected
        finally:
            self._collected = None

    def put(
        self, weights: Sequence[Tensor], x: Tensor, whole: Callable[[Tensor], Tensor], grads: Sequence[Tensor]
    ) -> None:
        assert self._collected is not None
        self._collected.append(PutOff(tuple(weights), x, whole, tuple(grads)))
