from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trigrid.data import corpus
from trigrid.data.corpus import BLOCK_BYTES, corpus_files, read_pieces, survey
from trigrid.data.progress import Progress
from trigrid.errors import Refused

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def refusal(entry: str | Path, quiet: Progress) -> str:
    with pytest.raises(Refused) as refused:
        survey([str(entry)], quiet)
    return str(refused.value)


def test_stdlib_is_its_own_source_and_nothing_else(quiet: Progress) -> None:
    documents = survey(["stdlib"], quiet)
    root = Path(os.__file__).parent
    names = [document.path.relative_to(root).as_posix() for document in documents]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "unittest/mock.py", "asyncio/base_events.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))]
    assert not [name for name in names if name.startswith(("_sysconfigdata", "config-")) or not name.endswith(".py")]
    assert 10e6 < sum(document.size_bytes for document in documents) < 30e6
    assert documents == survey(["stdlib"], quiet)


def test_entries_keep_their_order_are_sorted_within_and_count_once(tmp_path: Path, quiet: Progress) -> None:
    for name in ("b/z.txt", "b/a.txt", "b/sub/m.txt", "b/.hidden", "b/.git/x.txt", "a.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "b" / "link.txt").symlink_to(tmp_path / "a.txt")
    files = corpus_files([str(tmp_path / "b"), str(tmp_path / "b" / "a.txt"), str(tmp_path / "a.txt")], quiet)
    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        "b/a.txt",
        "b/link.txt",
        "b/sub/m.txt",
        "b/z.txt",
    ]


def test_every_entry_without_files_is_named_at_once(tmp_path: Path, quiet: Progress) -> None:
    (tmp_path / "hollow").mkdir()
    entries = [str(tmp_path / "gone"), str(tmp_path / "hollow"), "stdlib"]
    with pytest.raises(Refused) as refused:
        survey(entries, quiet)
    problems = refused.value.problems
    assert [(problem.key, problem.value) for problem in problems] == [("data.corpus", entry) for entry in entries[:2]]
    assert "no such file" in problems[0].reason
    assert "no file" in problems[1].reason
    with pytest.raises(Refused, match="nearest legal: stdlib"):
        survey([], quiet)


def test_empty_files_are_no_documents(tmp_path: Path, quiet: Progress) -> None:
    (tmp_path / "empty.txt").touch()
    assert "1 files, all of them empty" in refusal(tmp_path, quiet)
    (tmp_path / "full.txt").write_text("x")
    assert [document.path.name for document in survey([str(tmp_path)], quiet)] == ["full.txt"]


@pytest.mark.parametrize("tail", [b"\xff tail", b"\xc3", b"\xe2\x82"])
def test_the_first_bad_byte_is_named_by_its_offset_in_the_file(tmp_path: Path, quiet: Progress, tail: bytes) -> None:
    path = tmp_path / "latin.txt"
    good = ("a" * (BLOCK_BYTES - 1) + "é" * 5).encode()
    path.write_bytes(good + tail)
    message = refusal(tmp_path, quiet)
    assert str(path) in message
    assert message.endswith(f"at byte {len(good)}")


def first_bad_byte(content: bytes) -> int | None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


@relaxed
@given(content=st.binary(min_size=1, max_size=12), block_bytes=st.integers(1, 4))
def test_decoding_in_blocks_agrees_with_decoding_at_once(
    tmp_path_factory: pytest.TempPathFactory, quiet: Progress, content: bytes, block_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "file"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK_BYTES", block_bytes)
        bad_byte = first_bad_byte(content)
        if bad_byte is None:
            assert "".join(piece.text for piece in read_pieces(survey([str(path)], quiet))) == content.decode()
        else:
            assert refusal(path, quiet).endswith(f"at byte {bad_byte}")


def test_what_cannot_be_read_is_refused_without_hanging(tmp_path: Path, quiet: Progress) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path, quiet)
    (tmp_path / "pipe").unlink()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert "cannot be read: No such file" in refusal(tmp_path, quiet)


@relaxed
@given(text=st.text(alphabet="ab é.\n", min_size=1, max_size=300), piece_chars=st.integers(1, 40))
def test_pieces_are_short_joined_they_are_the_text_and_the_last_says_so(
    tmp_path_factory: pytest.TempPathFactory, quiet: Progress, text: str, piece_chars: int
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "file"
    path.write_bytes(text.encode())
    pieces = list(read_pieces(survey([str(path)] * 2, quiet), piece_chars))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= piece_chars for piece in pieces)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_file_that_changes_after_the_survey_is_refused(tmp_path: Path, quiet: Progress) -> None:
    path = tmp_path / "file.txt"
    path.write_text("before")
    documents = survey([str(path)], quiet)
    path.write_text("after!")
    with pytest.raises(Refused, match=r"file\.txt: changed"):
        list(read_pieces(documents))


def test_survey_reports_bytes_up_to_the_total(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * (2 * BLOCK_BYTES + 1))
    (tmp_path / "small").write_bytes(b"y")
    seen: list[tuple[int, int]] = []
    survey([str(tmp_path)], lambda stage, done, total: seen.append((done, total)) if "reading" in stage else None)
    total = 2 * BLOCK_BYTES + 2
    assert {BLOCK_BYTES, 2 * BLOCK_BYTES, total - 1, total} == {done for done, _ in seen}
    assert {total} == {total for _, total in seen}
