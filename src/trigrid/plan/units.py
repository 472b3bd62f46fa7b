"""The units of this project's engine as programs on a tape, and what they say of memory: storage by storage what
`trigrid prove` traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from trigrid.blueprint.terms import Kernels
from trigrid.plan.compute import Cut
from trigrid.plan.operations import Again, Operations
from trigrid.plan.products import Layer
from trigrid.plan.tape import Storage, Tape
from trigrid.spec.model import ModelSpec


class Working(NamedTuple):
    """Bytes of a unit for one microbatch. kept: from forward to backward, with the input. later: from the backward of
    the input to that of the weights, where the two are apart; of it, passed: the gradient that has arrived, which its
    last product passes on to its weight.

    forward, whole, of_input, of_weights: all that is alive at the fullest moment of a forward, a whole backward, one of
    the input, one of the weights: what is kept, the gradient that arrives, what comes and goes.
    """

    kept: float
    later: float
    passed: float
    forward: float
    whole: float
    of_input: float
    of_weights: float


@dataclass(frozen=True)
class Unit:
    """A unit of one model on one rank. compute: bytes of an element; recompute: what its stage runs again; splits:
    its products put off the gradients of their weights; frozen: roles of weights that have no gradient."""

    spec: ModelSpec
    kernels: Kernels
    cut: Cut
    compute: int
    recompute: str
    splits: bool
    frozen: frozenset[str] = frozenset()

    def working(self, kind: str) -> Working:
        """Of a unit of `kind`, which must be one of the engine's."""
        program = self._programs[kind]
        boundary = self.boundary if kind != "embedding" else 0.0
        again, trained = self.recompute == "full", kind != "embedding" or not self._still
        tape = Tape()
        x = tape.make(boundary)
        out, _ = tape.apart(lambda: program(self._on(tape), x), graph=trained and not again)
        kept, forward = tape.now - out.size, tape.most
        if not trained:
            return Working(kept, 0.0, 0.0, forward, 0.0, 0.0, 0.0)
        whole, _, _ = self._backward(program, x.size, queue=False)
        if not self.splits or kind == "embedding":
            return Working(kept, 0.0, 0.0, forward, whole, whole, whole)
        of_input, later, passed = self._backward(program, x.size, queue=True)
        rows = self.wide if self.kernels.regather and self.cut.sequence_parallel else 0.0
        largest = self._largest(kind)
        of_weights = later + rows + self._on(tape).beside(largest) if largest else later
        return Working(kept, later, passed, forward, whole, of_input, of_weights)

    def _backward(self, program: Program, size: float, queue: bool) -> tuple[float, float, float]:
        """(most, left for the weights, of it the gradient that arrived) of a forward, if it is run again, and a
        backward."""
        tape = Tape(queue)
        x = tape.make(size)
        arrives = self.boundary if program != self._head else 0.0
        if self.recompute == "full":
            gradient = tape.make(arrives)
            out = program(self._on(tape), x)
            tape.drop(out)
        else:
            out = program(self._on(tape), x)
            tape.drop(out)
            gradient = tape.make(arrives)
            tape.most = tape.now
        out.gradient = tape.share(gradient)
        tape.backward()
        tape.drop(x, gradient)
        if x.gradient:
            tape.drop(x.gradient)
        left = tape.now
        assert left > -1, "a storage dies twice"
        assert queue or left < 1, "a storage outlives its backward"
        return tape.most, left, gradient.size if gradient.owners else 0.0

    def _on(self, tape: Tape) -> Operations:
        return Operations(tape, self.cut, self.kernels, self.compute)

    # Sizes

    @property
    def wide(self) -> float:
        """Hidden states of all tokens."""
        return self.cut.tokens * self.spec.hidden * self.compute

    @property
    def boundary(self) -> float:
        """What units hand on."""
        return self.wide / self.cut.tp if self.cut.sequence_parallel else self.wide

    def _rows(self, width: float) -> float:
        """Of all tokens with so many elements each."""
        return self.cut.tokens * width * self.compute

    @cached_property
    def _layers(self) -> Mapping[str, Layer]:
        """Bytes of the output of each product and of its weight's gradient."""
        spec, tp = self.spec, self.cut.tp
        q = spec.heads * spec.head_dim / tp
        k = spec.kv_heads * spec.head_dim / min(tp, spec.kv_heads)
        widths = {"q": q, "k": k, "v": k, "gate": spec.ffn / tp, "up": spec.ffn / tp}
        found = {role: (self._rows(width), width * spec.hidden * self.compute) for role, width in widths.items()}
        found["o"] = (self.wide, q * spec.hidden * self.compute)
        found["down"] = (self.wide, widths["up"] * spec.hidden * self.compute)
        columns = self._columns
        found["head"] = (self._rows(columns), columns * spec.hidden * self.compute)
        return {role: (out, 0.0 if role in self.frozen else weight) for role, (out, weight) in found.items()}

    def _together(self, roles: Sequence[str]) -> list[Layer]:
        """The layers of `roles` as one, where their weights lie one after the other."""
        layers = [self._layers[role] for role in roles]
        alike = all(len({role + end in self.frozen for role in roles}) == 1 for end in ("", "_bias"))
        if not alike or ("k" in roles and self.cut.tp > self.spec.kv_heads):
            return layers
        return [(sum(out for out, _ in layers), sum(weight for _, weight in layers))]

    @property
    def _columns(self) -> float:
        """Of the vocabulary, padded."""
        return -(-self.spec.vocab // self.cut.tp)

    def _largest(self, kind: str) -> float:
        """Bytes of the largest weight whose gradient is put off."""
        if kind == "head":
            return self._layers["head"][1] if self.kernels.loss != "pieces" else 0.0
        inner = ("gate", "up") if self.spec.block == "llama" else ("up",)
        return max(weight for roles in ("qkv", "o", inner, ("down",)) for _, weight in self._together(roles))

    # Programs

    @cached_property
    def _programs(self) -> Mapping[str, Program]:
        return {"embedding": self._embedding, "llama": self._block, "gpt": self._block, "head": self._head}

    def _block(self, run: Operations, x: Storage) -> Storage:
        tape = run.tape
        # Where a stage runs its blocks again each makes its own; else they share one, which is the stage's.
        own = self.kernels.documents and self.recompute == "full"
        mask = run.mask() if own else tape.make(0)
        middle = self._add(run, x, self._attend(run, x, mask))
        out = self._add(run, middle, self._feed_forward(run, middle))
        tape.drop(middle, mask)
        return out

    def _add(self, run: Operations, x: Storage, more: Storage) -> Storage:
        tape = run.tape
        if self.kernels.hashed_dropout:
            dropped = run.hidden_dropout(more)
            tape.drop(more)
            more = dropped
        out = run.residual(x, more)
        tape.drop(more)
        return out

    def _attend(self, run: Operations, x: Storage, mask: Storage) -> Storage:
        tape, layers, spec = run.tape, self._layers, self.spec
        qkv = run.column(self._norm(run), x, self._together("qkv"), self._cheap)
        inputs, again = self._place(run, qkv, [layers[role][0] for role in "qkv"])
        tape.drop(qkv)
        heads = spec.heads / self.cut.tp
        if self.kernels.fused_attention:
            o = run.attention(inputs, heads, mask, again)
        else:
            o = run.unfused_attention(inputs, heads, mask, again if self._cheap else None)
        (y,) = run.products(o, [layers["o"]])
        left = run.leave(y)
        tape.drop(*inputs, o, y)
        return self._with_bias(run, left)

    def _place(self, run: Operations, qkv: Storage, sizes: Sequence[float]) -> tuple[list[Storage], list[Again]]:
        """Queries and keys with their places, values, and what makes the first two again where they are not kept."""
        if self.spec.block != "llama":
            return run.heads(qkv, sizes), []
        if not self.spec.qk_norm:
            return run.rotate_heads(qkv, sizes), []
        q, k, v = run.heads(qkv, sizes)

        def turn(x: Storage) -> Storage:
            normal = run.norm(x, self.spec.head_dim)
            out = run.rotate(normal)
            run.tape.drop(normal)
            return out

        pairs = [run.made(turn, x) for x in (q, k)] if self._cheap else []
        placed = [x for x, _ in pairs] or [turn(x) for x in (q, k)]
        run.tape.drop(q, k)
        return [*placed, v], [again for _, again in pairs]

    def _with_bias(self, run: Operations, x: Storage) -> Storage:
        if self.spec.block == "llama":
            return x
        out = run.bias(x)
        run.tape.drop(x)
        return out

    def _feed_forward(self, run: Operations, x: Storage) -> Storage:
        tape, layers, norm = run.tape, self._layers, self._norm(run)
        if self.spec.block == "llama":
            inner = run.column(norm, x, self._together(("gate", "up")), self._cheap)
            out = run.row(run.swiglu, [inner], layers["down"], self._cheap)
        else:
            inner = run.column(norm, x, [layers["up"]], self._cheap)
            out = run.row(run.gelu, [inner], layers["down"], self._cheap)
        tape.drop(inner)
        return self._with_bias(run, out)

    def _norm(self, run: Operations) -> Callable[[Storage], Storage]:
        return lambda x: run.norm(x, self.spec.hidden)

    @property
    def _cheap(self) -> bool:
        return self.recompute == "selective"

    @property
    def _still(self) -> bool:
        """Whether nothing of an embedding is trained."""
        return self.frozen >= {"embedding", *(("positions",) if self.spec.block == "gpt" else ())}

    def _embedding(self, run: Operations, x: Storage) -> Storage:
        still = "embedding" in self.frozen
        weight = self._columns * self.spec.hidden * self.compute
        look_up = partial(run.embed, x, self.wide, weight)
        out = run.tape.apart(look_up, graph=False)[0] if still else look_up()
        if self.spec.block == "gpt":
            placed = run.positions(out) if still else run.bias(out)
            run.tape.drop(out)
            out = placed
        if self.kernels.hashed_dropout:
            dropped = run.hidden_dropout(out)
            run.tape.drop(out)
            out = dropped
        return out

    def _head(self, run: Operations, x: Storage) -> Storage:
        tape, (size, weight) = run.tape, self._layers["head"]
        normal = run.norm(x, self.spec.hidden)
        entered = run.enter(normal)
        tape.drop(normal)
        if self.kernels.loss == "pieces":
            out = run.loss_in_pieces(entered, size, weight, self.kernels.pieces)
        else:
            (logits,) = run.products(entered, [(size, weight)])
            out = run.loss(logits)
            tape.drop(logits)
        tape.drop(entered)
        return out


Program = Callable[[Operations, Storage], Storage]
