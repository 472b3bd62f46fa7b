"""What each rank does in a named schedule, as phases: so many times these words.

A word is a kind of action and the chunk it is of: "F0" is the forward of the rank's first stage, "B1" the backward of
its second. Without a number the word runs through all stages of the rank, a group of p microbatches in each before
the next, "B" from the last stage to the first. The k-th use of a word takes its k-th microbatch; "W" takes the
weights of the oldest input backward that still misses them.

The programs are for a number of microbatches that suits them: a multiple of p, or for V shapes at least 2p − 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Phase = tuple[int, str]


class Size(NamedTuple):
    """chunks: stages of each rank."""

    ranks: int
    microbatches: int
    chunks: int


class Program(NamedTuple):
    """chunks: stages of each rank, None where any number is possible; v_shaped: stages run to the last rank and back,
    else always in the order of the ranks; phases: the program of one rank."""

    chunks: int | None
    v_shaped: bool
    phases: Callable[[int, Size], Sequence[Phase]]


def _gpipe(rank: int, size: Size) -> Sequence[Phase]:
    """All forwards, then all backwards in the same order (Huang 2019).

    Equal stages: bubble (p − 1)/m; m microbatches in flight.
    """
    del rank
    return [(size.microbatches, "F0"), (size.microbatches, "B0")]


def _one_forward_one_backward(rank: int, size: Size) -> Sequence[Phase]:
    """A warm-up of forwards, then a forward and a backward in turn (PipeDream-flush; Narayanan 2021, section 2.2).

    One chunk: a warm-up of p − rank − 1; bubble (p − 1)/m; min(m, p − rank) in flight. v chunks: a warm-up as long as
    Megatron-LM's, twice that and v − 1 groups; bubble (p − 1)/(v·m) where m is a multiple of p, and rank 0 holds
    min(p·v + p − 1, m·v) chunks. With another m it is that of the next multiple without its surplus.
    """
    after = size.ranks - rank - 1
    total = size.microbatches * size.chunks
    warm_up = after if size.chunks == 1 else min(total, 2 * after + (size.chunks - 1) * size.ranks)
    return [(warm_up, "F"), (total - warm_up, "F B"), (warm_up, "B")]


def _zb_h1(rank: int, size: Size) -> Sequence[Phase]:
    """1F1B whose weights lag `rank` microbatches behind and fill the end (ZB-H1; Qi 2023, section 2.1).

    Equal stages, m ≥ p: every rank idles (p − 1)(F + I − W) where W is the shortest of the three, else (p − 1)F or
    (p − 1)I, whichever is more. At most p microbatches are in flight on any rank, as on the first one of 1F1B.
    """
    after = size.ranks - rank - 1
    both = size.microbatches - size.ranks + 1
    return [(after, "F0"), (rank, "F0 I0"), (both, "F0 I0 W"), (after, "I0 W"), (rank, "W")]


def _zbv(rank: int, size: Size) -> Sequence[Phase]:
    """Zero bubble over a V (ZB-V of Qi 2023, V-ZB of Qi 2024).

    F = I = W for every chunk, m ≥ 2p − 1: no rank idles between its first action and its last, so the step takes
    2m(F + I + W) + (p − 1)F, the least that is possible; 2p chunks in flight on every rank, as 1F1B's p whole stages.
    """
    after = size.ranks - rank - 1
    steady = size.microbatches - 2 * size.ranks + rank + 1
    return [
        (2 * after + 1, "F0"),
        (rank, "F1 F0"),
        (after + 1, "F1 I1 W"),
        (steady, "F0 I0 W F1 I1 W"),
        (after, "I0 W F1 I1 W"),
        (rank, "I0 I1"),
        (after + 1, "I0 W"),
        (2 * rank, "W"),
    ]


def _dualpipev(rank: int, size: Size) -> Sequence[Phase]:
    """DualPipe cut in half and folded to a V (DeepSeek-AI 2024, section 3.2.1; the DualPipe repository's DualPipeV).

    m ≥ 2p: 2p + 1 chunks in flight on every rank. A forward and the backward behind it are neighbours so that one
    may hide the other's communication. With the two as one piece of work F&B and F = I, rank 0 idles the published
    (p − 1)(F&B + B − 3W), by chunk; played as single actions results leave earlier: (p − 1)F where F = I = W.
    """
    after = size.ranks - rank - 1
    steady = size.microbatches - 2 * size.ranks + rank + 1
    half, odd = divmod(rank + 1, 2)
    return [
        (2 * after, "F0"),
        (rank + 1, "F0 F1"),
        (after, "I1 W F1"),
        (steady, "F0 B1 F1 B0"),
        (after, "B1 F1 B0"),
        (half, "B1 B0"),
        (odd, "B1 I0"),
        (half, "I1 I0"),
        (after, "W I0"),
        (rank + 1, "W"),
    ]


PROGRAMS = {
    "gpipe": Program(1, False, _gpipe),
    "1f1b": Program(1, False, _one_forward_one_backward),
    "interleaved": Program(None, False, _one_forward_one_backward),
    "zb-h1": Program(1, False, _zb_h1),
    "zbv": Program(2, True, _zbv),
    "dualpipev": Program(2, True, _dualpipev),
}
