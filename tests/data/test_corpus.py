from __future__ import annotations

import os
from pathlib import Path

import pytest

from trigrid.data.corpus import Source, once, resolve
from trigrid.data.progress import Progress
from trigrid.data.tokens import TokenWriter
from trigrid.errors import Refused


def sources(entry: str | Path, quiet: Progress) -> tuple[Source, ...]:
    (found,) = resolve([str(entry)], quiet)
    return found.sources


def refusal(entry: str | Path, quiet: Progress) -> str:
    with pytest.raises(Refused) as refused:
        resolve([str(entry)], quiet)
    return str(refused.value)


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)


def test_stdlib_is_its_own_source_and_nothing_else(quiet: Progress) -> None:
    found = sources("stdlib", quiet)
    names = [source.name for source in found]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "unittest/mock.py", "asyncio/base_events.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))]
    assert not [name for name in names if name.startswith(("_sysconfigdata", "config-")) or not name.endswith(".py")]
    assert {source.kind for source in found} == {"text"}
    assert 10e6 < sum(source.size_bytes for source in found) < 30e6
    assert found == sources("stdlib", quiet)


def test_entries_keep_their_order_are_sorted_within_and_count_once(tmp_path: Path, quiet: Progress) -> None:
    names = ("b/z.txt", "b/a.txt", "b/sub/m.txt", "b/.hidden", "b/.git/x.txt", "a.txt")
    touch(*(tmp_path / name for name in names))
    (tmp_path / "b" / "link.txt").symlink_to(tmp_path / "a.txt")
    entries = resolve([str(tmp_path / "b"), str(tmp_path / "b" / "a.txt"), str(tmp_path / "a.txt")], quiet)
    assert [source.name for source in entries[0].sources] == ["a.txt", "link.txt", "sub/m.txt", "z.txt"]
    assert [source.name for source in entries[2].sources] == ["a.txt"]
    unique = once([source for entry in entries for source in entry.sources])
    assert [source.path for source in unique] == [source.path for source in entries[0].sources]


def test_a_source_is_its_name_below_the_entry_its_size_and_its_times(tmp_path: Path, quiet: Progress) -> None:
    touch(tmp_path / "c" / "sub" / "m.txt")
    os.utime(tmp_path / "c" / "sub" / "m.txt", ns=(1, 1234567890123456789))
    path = str(tmp_path / "c" / "sub" / "m.txt")
    changed = os.stat(path).st_ctime_ns
    mtime_ns = 1234567890123456789
    expected = Source(kind="text", path=path, name="sub/m.txt", size_bytes=5, mtime_ns=mtime_ns, ctime_ns=changed)
    assert sources(tmp_path / "c", quiet) == (expected,)


def test_the_kind_is_told_by_the_name(tmp_path: Path, quiet: Progress) -> None:
    names = ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.arrow", "e.json", "f.json.gz", "g.txt", "h")
    touch(*(tmp_path / "c" / name for name in names))
    inside = [source.kind for source in sources(tmp_path / "c", quiet)]
    assert inside == ["jsonl", "gzip", "parquet", "arrow", "text", "text", "text", "text"]
    alone = [sources(tmp_path / "c" / name, quiet)[0].kind for name in names]
    assert alone == ["jsonl", "gzip", "parquet", "arrow", "jsonl", "gzip", "text", "text"]


def test_token_files_are_known_by_prefix_or_either_half(tmp_path: Path, quiet: Progress) -> None:
    with TokenWriter(tmp_path / "t.v1", 10) as writer:
        writer.add([1])
        writer.end_document()
    for name in ("t.v1", "t.v1.bin", "t.v1.idx"):
        (entry,) = resolve([str(tmp_path / name)], quiet)
        assert (entry.ready, entry.sources) == (tmp_path / "t.v1", ())
    (tmp_path / "t.v1.bin").unlink()
    assert "no such file or folder" in refusal(tmp_path / "t.v1", quiet)


def test_every_entry_without_files_is_named_at_once(tmp_path: Path, quiet: Progress) -> None:
    (tmp_path / "hollow").mkdir()
    entries = [str(tmp_path / "gone"), str(tmp_path / "hollow"), "stdlib"]
    with pytest.raises(Refused) as refused:
        resolve(entries, quiet)
    problems = refused.value.problems
    assert [(problem.key, problem.value) for problem in problems] == [("data.corpus", entry) for entry in entries[:2]]
    assert "no such file" in problems[0].reason
    assert "no file" in problems[1].reason
    with pytest.raises(Refused, match="nearest legal: stdlib"):
        resolve([], quiet)


def test_what_cannot_be_read_is_refused_without_hanging(tmp_path: Path, quiet: Progress) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path, quiet)
    (tmp_path / "pipe").unlink()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert "cannot be read: No such file" in refusal(tmp_path, quiet)
