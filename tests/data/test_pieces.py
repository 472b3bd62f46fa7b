from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.data import pieces
from trigrid.data.pieces import Block, cut_into_pieces, may_cut
from trigrid.errors import Refused

TEXTS = st.text(alphabet="ab é.\n", max_size=200)


def blocks_of(text: str, size: int) -> list[Block]:
    starts = range(0, max(len(text), 1), size)
    return [Block(text[start : start + size], start + size >= len(text), "here") for start in starts]


@settings(deadline=None, max_examples=200)
@given(texts=st.lists(TEXTS, max_size=4), size=st.integers(1, 50), short=st.integers(1, 30), more=st.integers(0, 60))
def test_joined_they_are_the_text_and_the_blocks_do_not_matter(
    texts: list[str], size: int, short: int, more: int
) -> None:
    found = list(
        cut_into_pieces([block for text in texts for block in blocks_of(text, size)], True, short, short + more)
    )
    whole = list(cut_into_pieces([Block(text, True, "here") for text in texts], True, short, short + more))
    assert found == whole
    documents: list[list[pieces.Piece]] = [[]]
    for piece in found:
        documents[-1].append(piece)
        if piece.last:
            documents.append([])
    assert ["".join(piece.text for piece in document) for document in documents] == [*texts, ""]
    for text, document in zip(texts, documents[:-1], strict=True):
        assert [piece.number for piece in document] == list(range(len(document)))
        assert {piece.head for piece in document} == {hashlib.sha256(text.encode()).hexdigest()}
        assert all(len(piece.text) <= short + more for piece in document)
        place = 0
        for piece in document[:-1]:
            place += len(piece.text)
            assert may_cut(text, place) or len(piece.text) == short + more


@settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet="aé日 \n", max_size=60), head=st.integers(1, 20), size=st.integers(1, 9))
def test_the_head_is_of_the_first_bytes_of_the_text(text: str, head: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "HEAD_BYTES", head)
        found = list(cut_into_pieces(blocks_of(text, size), True, 5, 10))
    assert {piece.head for piece in found} == {hashlib.sha256(text.encode()[:head]).hexdigest()}


def test_whole_documents_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LONGEST_WHOLE_BYTES", 1000)
    text = "one two " * 125
    assert [piece.text for piece in cut_into_pieces(blocks_of(text, 10), False, 8, 8)] == [text]
    with pytest.raises(Refused, match=r"data\.corpus = here: holds a document of more than 1,000 bytes"):
        list(cut_into_pieces(blocks_of(text + "é", 10), False, 8, 8))
    monkeypatch.setattr(pieces, "HEAD_BYTES", 16)
    with pytest.raises(Refused, match="this tokenizer must take whole"):
        list(cut_into_pieces(blocks_of(text + "é", 10), False, 8, 8))


def test_a_document_without_text_is_one_piece_without_text() -> None:
    (piece,) = cut_into_pieces([Block("", True, "here")], True)
    assert (piece.text, piece.last, piece.number) == ("", True, 0)
