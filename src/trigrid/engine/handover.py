"""How products hand over what the gradients of their weights are made of.

The gradient of a weight is that of the product's output times its input. A product leaves both to whoever takes them:
to be multiplied at once, onto what its bucket holds already, or later, in a schedule that splits backwards (Qi 2023).
So no gradient of a weight is there beside its bucket, and no product is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class Factors(NamedTuple):
    """Of the gradients of weights that multiply one input.

    whole: from x, which may be kept for long, to the input that the products had, which may have to be gathered; grads:
    of their outputs.
    """

    weights: tuple[Tensor, ...]
    x: Tensor
    whole: Callable[[Tensor], Tensor]
    grads: tuple[Tensor, ...]


class Handover:
    """From the products of a rank to the unit whose backward runs."""

    def __init__(self) -> None:
        self._take: Callable[[Factors], None] | None = None

    @contextmanager
    def to(self, take: Callable[[Factors], None]) -> Iterator[None]:
        """Meanwhile `take` is given all factors."""
        assert self._take is None
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def give(self, factors: Factors) -> None:
        assert self._take is not None, "nobody takes what gradients of weights are made of"
        self._take(factors)
