"""One layout with its batch, as the plain numbers that memory and time are computed from."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from trigrid.blueprint import split_layers
from trigrid.plan.compute import Cut
from trigrid.spec.layout import SPLIT_BACKWARD as SPLIT_BACKWARD
from trigrid.spec.layout import V_SHAPED as V_SHAPED


class Setup(NamedTuple):
    """A layout and a batch. microbatches: of one rank and step; recompute: "none", "selective" or "full", the last for
    `recomputed` of the blocks, or such a word for each stage. stage_layers: by stage, all pp · virtual of them; empty:
    as even as they go. order: axes, slowest first. gather_per_use, reduce_per_microbatch: ZeRO's two policies.
    imbalance: load of the fullest expert rank over the mean. bucket_numel: elements of a bucket that units share."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    zero: int = 1
    gather_per_use: bool = False
    reduce_per_microbatch: bool = False
    schedule: str = "1f1b"
    virtual: int = 1
    micro_batch: int = 1
    microbatches: int = 1
    sequence: int = 4096
    sequence_parallel: bool = True
    recompute: str | tuple[str, ...] = "none"
    recomputed: float = 1.0
    stage_layers: tuple[int, ...] = ()
    order: tuple[str, ...] = ("dp", "pp", "cp", "tp")
    imbalance: float = 1.0
    bucket_numel: int = 0

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer's state of what is no expert."""
        return self.dp // self.dp_replicate * self.cp

    @property
    def cut(self) -> Cut:
        sp = self.sequence_parallel and self.tp > 1
        return Cut(self.tp, self.cp, self.ep, sp, self.micro_batch, self.sequence)

    @property
    def recompute_text(self) -> str:
        """What is recomputed in one word, or in one for each stage as a flag takes them."""
        return self.recompute if isinstance(self.recompute, str) else ",".join(self.recompute)

    def at(self, stage: int) -> Setup:
        """The setup with what one stage recomputes in place of what all do."""
        return self if isinstance(self.recompute, str) else self._replace(recompute=self.recompute[stage])

    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp}
        found, step = {}, 1
        for axis in reversed(self.order):
            found[axis] = step
            step *= degrees[axis]
        return found

    def layers_of(self, layers: int) -> tuple[int, ...]:
        """Blocks of each stage."""
        return self.stage_layers or split_layers(layers, self.pp * self.virtual)

    def holder(self, stage: int) -> int:
        """The pipeline rank of a stage."""
        if self.schedule in V_SHAPED:
            return stage if stage < self.pp else 2 * self.pp - 1 - stage
        return stage % self.pp


@lru_cache(maxsize=4096)
def most_in_flight(name: str, pp: int, microbatches: int, virtual: int) -> tuple[tuple[int, int], ...]:
    """By rank i, the most chunks whose activations it holds until their input and until their weight backward.

    gpipe: m. 1f1b: min(m, p − i). interleaved: min(m·v, 2(p − i − 1) + (v − 1)·p + 1) (Narayanan 2021, section 2.2).
    zb-h1: min(m, p − i) and min(m, p) (Qi 2023, section 3.1). zbv and dualpipev: at most 2p and 2p + 1, and while few
    microbatches are there, those that have passed the rank going down, and coming back as far as the way is filled.
    """
    m = microbatches
    if name == "gpipe":
        return ((m, m),) * pp
    if name == "interleaved" and virtual > 1:
        most = (2 * (pp - rank - 1) + (virtual - 1) * pp + 1 for rank in range(pp))
        return tuple((n, n) for n in (min(m * virtual, n) for n in most))
    if name in V_SHAPED:
        cap = 2 * pp + (name == "dualpipev")
        return tuple((n, n) for n in (min(2 * m, m + 1 + rank, cap) for rank in range(pp)))
    return tuple((min(m, pp - rank), min(m, pp if name == "zb-h1" else pp - rank)) for rank in range(pp))


@lru_cache(maxsize=4096)
def held_at_once(name: str, pp: int, microbatches: int, virtual: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """By rank i, what it holds at its fullest: chunks that wait for their input backward, and beside them chunks that
    wait for their weight backward only, as pairs of which one holds most, whichever of the two kinds is larger.

    Where what waits for weights is the larger kind, as under full recomputation, zb-h1 is fullest with i + 1 of them, V
    shapes with one, or while they drain: zbv holds 2i + 1 then, dualpipev i + 1, fewer where microbatches are few (of
    p < m < 2p − 1 not less than it is).
    """
    p, m = pp, microbatches
    few = max(0, 2 * p - 1 - m)
    found = []
    for rank, (until_input, until_weight) in enumerate(most_in_flight(name, pp, microbatches, virtual)):
        pairs = [(until_input, until_weight - until_input)]
        after, fewer = p - rank - 1, until_weight - 1
        if name == "zb-h1":
            waiting = min(m, rank + 1)
            pairs.append((until_weight - waiting, waiting))
        elif name == "zbv":
            pairs.append((fewer, 1))
            if m > p:
                pairs.append((max(0, after - few), min(2 * rank, 2 * (m - p)) + 1))
        elif name == "dualpipev":
            if after:
                pairs.append((min(fewer, 2 * p - 1), 1))
            if m > p:
                pairs.append((max(0, after - few), min(rank, m - p) + 1))
        found.append(tuple(pairs))
    return tuple(found)
