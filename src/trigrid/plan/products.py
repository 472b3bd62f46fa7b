"""Tensor-parallel regions and products of this project's engine on a tape, by the names of `engine/tensor.py`.

Sizes are in bytes. What an operation makes, the caller owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trigrid.blueprint.terms import Kernels
from trigrid.plan.backend import copied, scattered
from trigrid.plan.compute import Cut
from trigrid.plan.tape import Gradients, Storage, Tape

Make = Callable[..., Storage]
"""Storages → one more, by operations that are cheap for its size."""
Layer = tuple[float, float]
"""Bytes of a product's output and of its weight's gradient, 0 where it has none."""


@dataclass(frozen=True)
class Products:
    """On one tape. compute: bytes of an element."""

    tape: Tape
    cut: Cut
    kernels: Kernels
    compute: int

    @property
    def wide(self) -> int:
        """Bytes of an element in the format of sums, at least fp32."""
        return max(4, self.compute)

    @property
    def _region(self) -> str:
        return "" if self.cut.tp == 1 else "gather" if self.cut.sequence_parallel else "copy"

    def enter(self, x: Storage) -> Storage:
        """The whole sequence."""
        tape = self.tape
        if not self._region:
            return tape.share(x)
        gathers = self._region == "gather"
        out = tape.make(x.size * self.cut.tp) if gathers else tape.share(x)

        def back() -> Gradients:
            gradient = tape.take(out)
            found = self._scatter(gradient) if gathers else tape.make(x.size)
            tape.drop(gradient)
            return [(x, found)]

        tape.record(back)
        return out

    def leave(self, x: Storage) -> Storage:
        """Summed over TP, into shards of the sequence or a copy."""
        tape = self.tape
        if not self._region:
            return tape.share(x)
        scatters = self._region == "gather"
        out = self._scatter(x) if scatters else tape.make(x.size)

        def back() -> Gradients:
            gradient = tape.take(out)
            if not scatters:
                return [(x, gradient)]
            found = tape.make(x.size)
            tape.drop(gradient)
            return [(x, found)]

        tape.record(back)
        return out

    def _scatter(self, x: Storage) -> Storage:
        """This rank's part of the sequence, summed over TP."""
        tape, (arriving, summed) = self.tape, scattered(x.size, self.cut.tp, self.kernels.gloo)
        arrived = tape.make(arriving)
        if not summed:
            return arrived
        found = tape.make(summed)
        tape.drop(arrived)
        return found

    def column(self, make: Make, x: Storage, layers: Sequence[Layer], again: bool) -> Storage:
        gathers = self._region == "gather"
        if again and (not gathers or self.kernels.regather):
            return self._side_by_side(self._products(make, [x], layers, self._region))
        made = make(x)
        if gathers and self.kernels.regather:
            found = self._products(self.tape.share, [made], layers, self._region)
            self.tape.drop(made)
            return self._side_by_side(found)
        entered = self.enter(made)
        self.tape.drop(made)
        found = self.products(entered, layers)
        self.tape.drop(entered)
        return self._side_by_side(found)

    def _side_by_side(self, outputs: Sequence[Storage]) -> Storage:
        tape = self.tape
        if len(outputs) == 1:
            return outputs[0]
        out = tape.make(sum(one.size for one in outputs))

        def back() -> Gradients:
            gradient = tape.take(out)
            found = [(one, tape.part(gradient, one.size)) for one in outputs]
            tape.drop(gradient)
            return found

        tape.record(back)
        tape.drop(*outputs)
        return out

    def row(self, make: Make, inputs: Sequence[Storage], layer: Layer, again: bool) -> Storage:
        if again:
            (out,) = self._products(make, inputs, [layer], "")
        else:
            made = make(*inputs)
            (out,) = self.products(made, [layer])
            self.tape.drop(made)
        left = self.leave(out)
        self.tape.drop(out)
        return left

    def products(self, x: Storage, layers: Sequence[Layer]) -> list[Storage]:
        return self._products(self.tape.share, [x], layers, "")

    def beside(self, weight: float) -> float:
        """Of a product that is a weight's gradient of so many bytes, what is made beside the bucket: all of it where
        that has another format."""
        return weight if self.compute < self.wide else 0.0

    def _products(self, make: Make, inputs: Sequence[Storage], layers: Sequence[Layer], region: str) -> list[Storage]:
        """Products that find again in backward what they are given by `make`."""
        tape = self.tape
        more = self.cut.tp if region == "gather" else 1
        made, _ = tape.apart(partial(make, *inputs), graph=False)
        size = made.size * more
        if more > 1:
            tape.drop(made)
            made = tape.make(size)
            tape.work(size / more)
        outs = [tape.make(out) for out, _ in layers]
        tape.drop(made)
        plain, trained = make == tape.share, any(weight for _, weight in layers)

        def back() -> Gradients:
            gradients = [tape.take(out) for out in outs]
            made, through = tape.make(0), None
            if not plain:
                made, through = tape.apart(partial(make, *inputs), graph=True)
            elif trained:
                made = tape.share(inputs[0])
            wanted = [gradient for gradient, (_, weight) in zip(gradients, layers, strict=True) if weight]
            if wanted and tape.queue:
                for storage in (made, *wanted):
                    tape.share(storage)
            elif wanted:
                rows = tape.make(size) if more > 1 else tape.share(made)
                tape.work(max(self.beside(weight) for _, weight in layers))
                tape.drop(rows)
            into = tape.make(size)
            if len(layers) > 1:
                tape.work(size)
            if more > 1:
                whole, into = into, self._scatter(into)
                tape.drop(whole)
            elif region == "copy":
                tape.work(copied(size, self.cut.tp, self.kernels.gloo))
            found = [(inputs[0], into)]
            if through:
                others = [x.gradient for x in inputs]
                made.gradient = tape.share(into)
                for x in inputs:
                    x.gradient = None
                through()
                found = [(x, tape.take(x)) for x in inputs]
                for x, other in zip(inputs, others, strict=True):
                    x.gradient = other
                tape.drop(into)
            tape.drop(made, *gradients)
            return found

        tape.record(back, *(inputs if trained or not plain else ()))
        return outs
