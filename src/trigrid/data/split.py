"""Which documents are held out: a question to each document alone, whatever else is in the corpus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trigrid.data.corpus import KEY as CORPUS_KEY
from trigrid.data.pieces import Piece
from trigrid.errors import Problem, Refused

KEY = "data.validation_fraction"
DIGITS = 13
GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples, modulo 1, are spread evenly."""


def place_of(head: str) -> float:
    """A document's place in [0, 1), by the SHA-256 of the first 1 MiB of its text: it is held out where that lies below
    the fraction."""
    return int(head[:DIGITS], 16) / float(16**DIGITS)


def sample_place(head: str, number: int) -> float:
    """Another one, of each piece of a document, for choosing a sample."""
    return (int(head[DIGITS : 2 * DIGITS], 16) / float(16**DIGITS) + number * GOLDEN) % 1


@dataclass(frozen=True)
class Places:
    """Of a set of documents: how many have text, how many of these are held out, between which places they lie, and how
    many have none."""

    documents: int = 0
    held_out: int = 0
    smallest: float = 1.0
    largest: float = 0.0
    empty: int = 0

    def __add__(self, other: Places) -> Places:
        return Places(
            self.documents + other.documents,
            self.held_out + other.held_out,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
            self.empty + other.empty,
        )


def places_of(piece: Piece, fraction: float) -> Places:
    """What a document's last piece adds."""
    if not piece.text and piece.number == 0:
        return Places(empty=1)
    place = place_of(piece.head)
    return Places(1, int(place < fraction), place, place)


def check_fraction(fraction: float) -> None:
    """Raises Refused for one outside [0, 1)."""
    if not 0 <= fraction < 1:
        nearest = 0.5 if fraction >= 1 else 0.0
        raise Refused([Problem(KEY, fraction, "must be at least 0 and below 1", (nearest,))])


def check_split(sets: Sequence[Places], names: Sequence[str], fraction: float) -> None:
    """Raises Refused where one of the sets (`names` tells the entries of each) has no text. And, with the nearest
    fraction that will do, where one is left without text to train on, or all of them together without any that is held
    out."""
    problems = [
        Problem(CORPUS_KEY, name, f"holds no text: {places.empty} documents, all of them empty")
        for places, name in zip(sets, names, strict=True)
        if not places.documents
    ]
    if problems:
        raise Refused(problems)
    total = sum(sets, Places())
    if fraction == 0 or (total.held_out and all(places.held_out < places.documents for places in sets)):
        return
    below = min(places.largest for places in sets)
    nearest = math.floor(below * 10_000) / 10_000 if total.held_out else math.ceil(total.smallest * 10_000) / 10_000
    legal = (nearest, 0.0) if total.smallest < nearest <= below else (0.0,)
    reason = f"puts {total.held_out} of {total.documents} documents into the validation set; neither set may be empty"
    if len(sets) > 1 and total.held_out:
        reason += ", and each corpus with a weight needs documents to train on"
    raise Refused([Problem(KEY, fraction, reason, legal)])
