"""Operations of this project's engine on a tape, those of `models/` and `engine/`: what each makes, keeps for its
backward and needs for a while. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trigrid.plan.products import Make, Products
from trigrid.plan.tape import Gradients, Storage

HASH = 4
"""Bytes of a number of a dropout's hash, of which two are there for each element while a mask is made."""
PLACE = 8
"""Bytes of a token's place in the vocabulary."""
Again = Callable[[], None]


class Operations(Products):
    """All operations of a unit."""

    def norm(self, x: Storage, width: int) -> Storage:
        """Over `width` elements. One kernel, or RMSNorm written out in at least fp32."""
        tape, numbers = self.tape, x.size / self.compute
        if self.kernels.fused_norm:
            return self._one_kernel(x, x.size, tape.make(numbers / width * self.wide))
        full, narrow = numbers * self.wide, self.compute < self.wide
        wide = tape.make(full) if narrow else tape.share(x)
        scale = tape.make(numbers / width * self.wide)
        normal = tape.make(full)
        out = tape.make(x.size) if narrow else tape.share(normal)
        tape.drop(normal, wide)

        def back() -> Gradients:
            gradient = tape.take(out)
            normal = tape.make(full)
            wide = tape.make(full) if narrow else tape.share(gradient)
            into = tape.make(full)
            found = tape.make(x.size) if narrow else tape.share(into)
            tape.drop(normal, wide, into, gradient)
            return [(x, found)]

        tape.record(back, x, scale)
        tape.drop(scale)
        return out

    def _one_kernel(self, x: Storage, size: float, *kept: Storage) -> Storage:
        """x → an output of `size`, whose backward needs x and `kept` and makes x's gradient at once."""
        tape = self.tape
        out = tape.make(size)

        def back() -> Gradients:
            gradient = tape.take(out)
            found = tape.make(x.size)
            tape.drop(gradient)
            return [(x, found)]

        tape.record(back, x, *kept)
        tape.drop(*kept)
        return out

    def gelu(self, up: Storage) -> Storage:
        return self._one_kernel(up, up.size)

    def swiglu(self, gate_and_up: Storage) -> Storage:
        tape = self.tape
        out = tape.make(gate_and_up.size / 2)

        def back() -> Gradients:
            gradient = tape.take(out)
            found = tape.make(gate_and_up.size)
            tape.work(gradient.size)
            tape.drop(gradient)
            return [(gate_and_up, found)]

        tape.record(back, gate_and_up)
        return out

    def rotate(self, x: Storage) -> Storage:
        """Rotary positions, which keep their tables alone."""
        return self._parts(x, [self.tape.make(x.size)])[0]

    def rotate_heads(self, qkv: Storage, sizes: Sequence[float]) -> list[Storage]:
        """The same of queries and keys, with a copy of the values."""
        return self._parts(qkv, [self.tape.make(size) for size in sizes])

    def heads(self, qkv: Storage, sizes: Sequence[float]) -> list[Storage]:
        """Queries, keys and values where the product has put them."""
        return self._parts(qkv, [self.tape.part(qkv, size) for size in sizes])

    def _parts(self, x: Storage, outs: list[Storage]) -> list[Storage]:
        """`outs`, made of x, which is not kept for it, and whose gradient is written from theirs."""
        tape = self.tape

        def back() -> Gradients:
            gradients = [tape.take(out) for out in outs]
            found = tape.make(x.size)
            tape.drop(*gradients)
            return [(x, found)]

        tape.record(back)
        return outs

    def bias(self, x: Storage) -> Storage:
        """x with a bias; the gradient goes through."""
        tape = self.tape
        out = tape.make(x.size)
        tape.record(lambda: [(x, tape.take(out))])
        return out

    def positions(self, x: Storage) -> Storage:
        """x, which has no gradient, with what is added to it."""
        tape = self.tape
        out = tape.make(x.size)

        def back() -> Gradients:
            tape.drop(tape.take(out))
            return []

        tape.record(back)
        return out

    def residual(self, x: Storage, more: Storage) -> Storage:
        tape = self.tape
        out = tape.make(x.size)

        def back() -> Gradients:
            gradient = tape.take(out)
            return [(x, tape.share(gradient)), (more, gradient)]

        tape.record(back)
        return out

    def hidden_dropout(self, x: Storage) -> Storage:
        """A copy, and a mask that is made of hashes and not kept."""
        tape = self.tape

        def copy(size: float) -> Storage:
            found = tape.make(size)
            tape.work(2 * HASH * size / self.compute)
            return found

        def back() -> Gradients:
            gradient = tape.take(out)
            found = copy(gradient.size)
            tape.drop(gradient)
            return [(x, found)]

        out = copy(x.size)
        tape.record(back)
        return out

    # Attention

    def made(self, make: Make, x: Storage) -> tuple[Storage, Again]:
        """What `make` makes of x, which alone is kept, and what makes it once more, until its own backward."""
        tape, again = self.tape, list[tuple[Storage, Again]]()
        out, _ = tape.apart(lambda: make(x), graph=False)

        def back() -> Gradients:
            gradient = tape.take(out)
            other, x.gradient = x.gradient, None
            made, through = again.pop()
            made.gradient = gradient
            through()
            found, x.gradient = tape.take(x), other
            tape.drop(made)
            return [(x, found)]

        tape.record(back, x)
        return out, lambda: again.append(tape.apart(lambda: make(x), graph=True))

    def mask(self) -> Storage:
        """Added to the scores of tokens in documents."""
        tape, numbers = self.tape, self.cut.tokens * self.cut.sequence
        seen = tape.make(numbers)
        found = tape.make(numbers * self.compute)
        tape.drop(seen)
        return found

    def attention(self, inputs: Sequence[Storage], heads: float, mask: Storage, again: Sequence[Again] = ()) -> Storage:
        """Fused, of queries, keys and values: beside its output and the mask it keeps a number for each query of
        `heads` heads. again: makes queries and keys once more, which are not kept then."""
        tape, (q, k, v) = self.tape, inputs
        sums = tape.make(heads * self.cut.tokens * self.wide)
        out = tape.make(q.size)

        def back() -> Gradients:
            gradient = tape.take(out)
            for make in again:
                make()
            found = [(x, tape.make(x.size)) for x in (q, k, v)]
            tape.drop(gradient)
            return found

        tape.record(back, *(() if again else (q, k)), v, out, sums, mask)
        tape.drop(sums)
        return out

    def unfused_attention(
        self, inputs: Sequence[Storage], heads: float, mask: Storage, again: Sequence[Again] | None
    ) -> Storage:
        """With dropout of the probabilities, which reach memory and are kept; where `again` is given they are not, but
        made again, and by it queries and keys."""
        tape, cut, (q, k, v) = self.tape, self.cut, inputs
        numbers = heads * cut.tokens * cut.sequence
        scores, seen = numbers * self.compute, 0.0 if self.kernels.documents else float(cut.sequence**2)

        def probabilities() -> Storage:
            raw = tape.make(scores)
            tape.work(q.size)
            tape.work(seen)
            found = tape.make(scores)
            tape.drop(raw)
            return found

        def gone() -> Storage:
            tape.work(2 * HASH * numbers)
            return tape.make(numbers)

        def back() -> Gradients:
            gradient = tape.take(out)
            for make in again or ():
                make()
            p = tape.share(kept[0]) if kept else probabilities()
            away = gone()
            rows = tape.make(gradient.size)
            tape.work(scores)
            of_v = tape.make(v.size)
            of_scores = tape.make(scores)
            tape.work(scores)
            found = [(q, tape.make(q.size)), (k, tape.make(k.size)), (v, of_v)]
            tape.drop(p, away, rows, of_scores, gradient)
            return found

        p = probabilities()
        kept = [p] if again is None else []
        away = gone()
        dropped = tape.make(scores) if kept else tape.share(p)
        out = tape.make(q.size)
        tape.record(back, *(() if again else (q, k)), v, mask, *kept)
        tape.drop(dropped, away, p)
        return out

    # The ends

    def embed(self, tokens: Storage, out: float, weight: float) -> Storage:
        """Rows of the vocabulary, which TP cuts."""
        tape, cut = self.tape, self.cut
        if cut.tp == 1:
            found = tape.make(out)

            def look_up() -> Gradients:
                gradient = tape.take(found)
                of_weight = tape.make(weight)
                tape.drop(gradient)
                return [(None, of_weight)]

            tape.record(look_up)
            return found
        rows = tape.make((PLACE + 1) * cut.tokens)
        raw = tape.make(out)
        own = tape.make(out)
        tape.drop(raw)

        def back() -> Gradients:
            gradient = tape.take(own)
            of_rows = tape.make(out)
            tape.drop(gradient)
            of_weight = tape.make(weight)
            tape.drop(of_rows)
            return [(None, of_weight)]

        tape.record(back, rows)
        left = self.leave(own)
        tape.drop(own, rows)
        return left

    def loss(self, logits: Storage) -> Storage:
        """Cross-entropy; the exponentials become the logits' gradient."""
        tape, tokens = self.tape, self.cut.tokens
        in_place = self.compute == self.wide
        softmax = tape.share(logits) if in_place else tape.make(logits.size / self.compute * self.wide)
        tape.work((2 * PLACE + 4 * self.wide) * tokens)
        labels = tape.make((PLACE + 1 + 2 * self.wide) * tokens)
        out = tape.make(0)

        def back() -> Gradients:
            tape.drop(tape.take(out))
            if in_place:
                return [(logits, tape.share(softmax))]
            return [(logits, tape.make(logits.size))]

        tape.record(back, softmax, labels)
        tape.drop(softmax, labels)
        return out

    def loss_in_pieces(self, x: Storage, logits: float, weight: float, pieces: int) -> Storage:
        """The same, `pieces` of the sequence one after the other, each computed again in backward. logits, weight:
        bytes of all logits, and of the gradient of the head's weight."""
        tape, tokens = self.tape, self.cut.tokens
        narrow, wide = logits / pieces, logits / pieces / self.compute * self.wide
        in_place = self.compute == self.wide
        tape.work((wide if in_place else narrow + wide) + (4 * self.wide + PLACE + 1) * tokens)
        sums = tape.make(3 * self.wide * tokens)
        out = tape.make(0)

        def back() -> Gradients:
            tape.drop(tape.take(out))
            total = tape.make(weight / self.compute * self.wide)
            inputs: list[Storage] = []
            before: list[Storage] = []
            for _ in range(pieces):
                one = tape.make(narrow)
                probabilities = tape.share(one) if in_place else tape.make(wide)
                tape.drop(one, *before[:1])
                gradient = tape.share(probabilities) if in_place else tape.make(narrow)
                tape.drop(*before[1:])
                inputs.append(tape.make(x.size / pieces))
                tape.work(weight)
                before = [probabilities, gradient]
            found = tape.make(x.size)
            tape.drop(*inputs, *before)
            if in_place:
                return [(x, found), (None, total)]
            of_weight = tape.make(weight)
            tape.drop(total)
            return [(x, found), (None, of_weight)]

        tape.record(back, x, sums)
        tape.drop(sums)
        return out
