"""How products hand over what the gradients of their weights are made of.

The gradient of a weight is that of the product's output times its input. The two are multiplied onto what the weight's
bucket holds already, at once or, in a schedule that splits backwards (Qi 2023), later. So no gradient of a weight is
there beside its bucket, and no product is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor


class Sink(Protocol):
    """Where the gradient of a weight goes."""

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """left · right, to what is there."""


class Factors(NamedTuple):
    """Of the gradients of weights that multiply one input.

    whole: from x, which may be kept for long, to the input that the products had, which may have to be gathered; grads:
    of their outputs.
    """

    sinks: tuple[Sink, ...]
    x: Tensor
    whole: Callable[[Tensor], Tensor]
    grads: tuple[Tensor, ...]

    def multiply(self) -> None:
        """Into their sinks."""
        rows = self.whole(self.x).flatten(0, -2)
        for sink, grad in zip(self.sinks, self.grads, strict=True):
            sink.add_product(grad.flatten(0, -2).t(), rows)


class Handover:
    """From the products of a rank: multiplied at once, unless somebody collects them for later."""

    def __init__(self) -> None:
        self._collected: list[Factors] | None = None

    @contextmanager
    def into(self, collected: list[Factors]) -> Iterator[None]:
        """Meanwhile all are put there."""
        assert self._collected is None
        self._collected = collected
        try:
            yield
        finally:
            self._collected = None

    def give(self, factors: Factors) -> None:
        """From a product whose backward runs."""
        if self._collected is None:
            factors.multiply()
        else:
            self._collected.append(factors)
