"""Documents cut into pieces, so that memory is bounded whatever the size of a document, without changing its tokens.

A document may be cut
- between a letter or digit and a blank or newline,
- between a newline that follows no white space and a letter or digit,
where the usual pre-tokenizers cut too; `Tokenizer.cuttable` says whether one does. Then the tokens of the pieces,
joined, are those of the whole. Only a stretch of `LONGEST_PIECE_CHARS` without such a place, longer than any word or
line of a text, is cut where it ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trigrid.data.corpus import KEY
from trigrid.errors import Problem, Refused

HEAD_BYTES = 1 << 20
PIECE_CHARS = 1 << 16
LONGEST_PIECE_CHARS = 1 << 18
LONGEST_WHOLE_BYTES = 1 << 23
"""Of a document that may not be cut: it is tokenised in one go, in up to 130 times this memory (1 GB)."""


@dataclass(frozen=True, slots=True)
class Block:
    """Text as a source gives it; the blocks of one document follow one another, `last` marks the end.

    where: the document's place, in words.
    """

    text: str
    last: bool
    where: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to tokenise by itself. head: SHA-256 of the first 1 MiB of the document's text; number: 0 for its first."""

    text: str
    last: bool
    head: str
    number: int


def cut_into_pieces(
    blocks: Iterable[Block],
    cuttable: bool,
    piece_chars: int = PIECE_CHARS,
    longest_piece_chars: int = LONGEST_PIECE_CHARS,
) -> Iterator[Piece]:
    """The documents in pieces of about `piece_chars`, or whole. A document without text is one piece without text.

    The places depend on the text alone, not on the blocks. Raises Refused for a document beyond `LONGEST_WHOLE_BYTES`
    that may not be cut.
    """
    pending, pending_bytes, head, number = "", 0, "", 0
    for block in blocks:
        pending = pending + block.text if pending else block.text
        if not head:
            pending_bytes += len(block.text) if block.text.isascii() else len(block.text.encode())
            if pending_bytes < HEAD_BYTES and not block.last:
                continue
            head = hashlib.sha256(pending[:HEAD_BYTES].encode()[:HEAD_BYTES]).hexdigest()
        elif not cuttable:
            pending_bytes += len(block.text.encode())
        at = 0
        if cuttable:
            while (place := _place_to_cut(pending, at, piece_chars, longest_piece_chars)) > at:
                yield Piece(pending[at:place], False, head, number)
                at, number = place, number + 1
        elif pending_bytes > LONGEST_WHOLE_BYTES:
            reason = (
                f"holds a document of more than {LONGEST_WHOLE_BYTES:,} bytes, which this tokenizer must take whole: "
                "its tokens depend on what comes before. Cut the document"
            )
            raise Refused([Problem(KEY, block.where, reason)])
        pending = pending[at:]
        if block.last:
            yield Piece(pending, True, head, number)
            pending, pending_bytes, head, number = "", 0, "", 0


def may_cut(text: str, place: int) -> bool:
    """Whether the usual pre-tokenizers cut between text[place - 1] and text[place]."""
    before, after = text[place - 1], text[place]
    if after in " \n":
        return before.isalnum()
    return before == "\n" and after.isalnum() and place > 1 and not text[place - 2].isspace()


def _place_to_cut(text: str, start: int, piece_chars: int, longest_chars: int) -> int:
    """Where the piece from `start` on ends; `start` where that is the end of the text, or cannot be told yet."""
    if len(text) - start <= piece_chars:
        return start
    for place in range(start + piece_chars, start + 1, -1):
        if may_cut(text, place):
            return place
    for place in range(start + piece_chars + 1, min(start + longest_chars, len(text) - 1) + 1):
        if may_cut(text, place):
            return place
    return start + longest_chars if len(text) - start > longest_chars else start
