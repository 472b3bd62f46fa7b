"""`prepare_folder`: processes side by side, killed and resumed, give the bytes that one quiet process gives."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from trigrid.data import shards
from trigrid.data.prepare import Prepared, prepare_folder
from trigrid.data.progress import Progress
from trigrid.errors import Refused, RunFailed

PROGRAM = (
    "import os, signal, sys\n"
    "from pathlib import Path\n"
    "from trigrid.data import shards\n"
    "from trigrid.data.prepare import prepare_folder\n"
    "shards.SHARD_BYTES = 20_000\n"
    "def progress(stage, done, total):\n"
    "    print(stage, done, total, flush=True)\n"
    "out, tokenizer, workers, fraction, *inputs = sys.argv[1:]\n"
    "prepare_folder(inputs, tokenizer, Path(out), vocab=400, validation_fraction=float(fraction),\n"
    "               text_key='text', workers=int(workers), progress=progress)\n"
)


@pytest.fixture
def inputs(tmp_path: Path, make_corpus: Callable[..., Path], make_text: Callable[..., str]) -> list[str]:
    """90 texts in files, 40 in lines, 20 in gzipped lines: some 350 kB, cut into some 15 shards."""
    folder = make_corpus(files=90)
    rows = [json.dumps({"text": make_text(300, number)}) + "\n" for number in range(200, 260)]
    (tmp_path / "lines.jsonl").write_text("".join(rows[:40]))
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress("".join(rows[40:]).encode(), mtime=0))
    return [str(folder), str(tmp_path / "lines.jsonl"), str(tmp_path / "lines.jsonl.gz")]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)


def make(inputs: list[str], out: Path, progress: Progress, workers: int = 1, **other: object) -> Prepared:
    settings = {"vocab": 400, "validation_fraction": 0.2, "text_key": "text", "tokenizer": "train"} | other
    return prepare_folder(inputs, out=out, workers=workers, progress=progress, **settings)  # type: ignore[arg-type]


def written(part: Path) -> tuple[int, int]:
    status = (part / "train.bin").stat()
    return status.st_ino, status.st_mtime_ns


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("small_shards")
def test_any_number_of_workers_gives_the_same_bytes(inputs: list[str], tmp_path: Path, quiet: Progress) -> None:
    one = make(inputs, tmp_path / "one", quiet)
    moments: list[tuple[int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage.startswith("tokenising"):
            moments.append((done, total))

    three = make(inputs, tmp_path / "three", progress, workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert set(contents(tmp_path / "one")) == {
        "data.json",
        "tokenizer.json",
        *(f"{split}.{end}" for split in ("train", "validation") for end in ("bin", "idx")),
    }
    assert one.hash == three.hash
    assert one.train[0].documents + one.validation[0].documents == 150
    size = sum(os.path.getsize(path) for path in inputs[1:]) + sum(
        f.stat().st_size for f in Path(inputs[0]).rglob("*.txt")
    )
    assert moments == sorted(moments)
    assert (moments[0], moments[-1]) == ((0, size), (size, size))
    names = {Path(inputs[0]).name, "lines.jsonl", "lines.jsonl.gz", "one", "three"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_size_of_a_shard_changes_nothing_in_the_tokens(
    inputs: list[str], tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(inputs, tmp_path / "whole", quiet)
    monkeypatch.setattr(shards, "SHARD_BYTES", 9000)
    make(inputs, tmp_path / "shards", quiet)
    assert contents(tmp_path / "whole") == contents(tmp_path / "shards")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_process_is_gone_on_with_and_finished_parts_are_kept(
    inputs: list[str], tmp_path: Path, quiet: Progress, tokenizer_file: Path, workers: int
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    out, tokenizer = tmp_path / "out", str(tokenizer_file)
    command = [sys.executable, str(tmp_path / "program.py"), str(out), tokenizer, str(workers), "0.2", *inputs]
    workshop = tmp_path / ".out.partial"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 60
        while len(list(workshop.glob("parts/part-*"))) < 3 and process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    parts = sorted(workshop.glob("parts/part-*"))
    before = {part: written(part) for part in parts}
    assert 3 <= len(parts) < 14

    done: list[int] = []

    def progress(stage: str, at: int, total: int) -> None:
        if stage.startswith("tokenising"):
            done.append(at)
        if stage.startswith("merging"):
            for part, status in before.items():
                assert written(part) == status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_BYTES", 20_000)
        resumed = make(inputs, out, progress, workers, tokenizer=tokenizer)
        assert not resumed.cached
        assert done[0] > 2 * 15_000
        assert contents(out) == contents(
            make(inputs, tmp_path / "clean", quiet, tokenizer=tokenizer).train[0].prefix.parent
        )
    assert not workshop.exists()


@pytest.mark.usefixtures("small_shards")
def test_another_plan_does_not_throw_unfinished_work_away(inputs: list[str], tmp_path: Path, quiet: Progress) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage.startswith("merging"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(inputs, tmp_path / "out", stop)
    assert len(list((tmp_path / ".out.partial" / "parts").iterdir())) > 10
    with pytest.raises(Refused, match=r"/\.out\.partial: holds what a call with other inputs left unfinished"):
        make(inputs[1:2], tmp_path / "out", quiet)
    assert len(list((tmp_path / ".out.partial" / "parts").iterdir())) > 10
    assert make(inputs, tmp_path / "out", quiet).train[0].documents > 40


def test_who_waited_for_another_plan_is_told(inputs: list[str], tmp_path: Path, quiet: Progress) -> None:
    """Two calls with one `--out`: the second must not take the first one's tokens for its own."""

    def meanwhile(stage: str, done: int, total: int) -> None:
        if stage.startswith("tokenising") and not second:
            second.append(pool.submit(make, inputs[1:2], tmp_path / "out", quiet))
            time.sleep(0.5)

    second: list[Future[Prepared]] = []
    with ThreadPoolExecutor(1) as pool:
        make(inputs, tmp_path / "out", meanwhile)
        with pytest.raises(Refused, match="holds token files of other inputs"):
            second[0].result(timeout=60)


@pytest.mark.usefixtures("small_shards")
def test_ctrl_c_stops_soon_and_keeps_the_parts(inputs: list[str], tmp_path: Path, quiet: Progress) -> None:
    for workers in (1, 2):

        def stop(stage: str, done: int, total: int) -> None:
            if stage.startswith("tokenising") and done > 60_000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(inputs, tmp_path / f"out{workers}", stop, workers)
        assert list((tmp_path / f".out{workers}.partial" / "parts").glob("part-*"))
        assert not (tmp_path / f"out{workers}").exists()
        assert make(inputs, tmp_path / f"out{workers}", quiet, workers).cached is False
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"trigrid.data.workers" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of children")
@pytest.mark.usefixtures("small_shards")
def test_a_worker_that_dies_is_told_and_the_rest_is_kept(inputs: list[str], tmp_path: Path, quiet: Progress) -> None:
    killed: list[int] = []

    def kill_one(stage: str, done: int, total: int) -> None:
        if stage.startswith("tokenising") and done and not killed:
            killed.append(children(os.getpid())[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(
        RunFailed, match="a process that tokenises was ended by SIGKILL, perhaps for lack of memory; the same"
    ):
        make(inputs, tmp_path / "out", kill_one, workers=2)
    assert not make(inputs, tmp_path / "out", quiet).cached


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of children")
def test_workers_die_with_their_parent_in_the_middle_of_a_shard(
    tmp_path: Path, tokenizer_file: Path, make_text: Callable[..., str]
) -> None:
    inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, path in enumerate(inputs):
        path.write_text(make_text(10_000, number) * 200)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", tmp_path / "out", tokenizer_file, "2", "0", *inputs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("tokenising") and int(line.split()[2]) > 0)
        orphans = children(process.pid)
        process.kill()
    assert len(orphans) == 2
    while any(Path(f"/proc/{orphan}/cmdline").exists() for orphan in orphans):
        time.sleep(0.01)
    (left,) = {path.name.split("-")[0] for path in (tmp_path / ".out.partial" / "parts").iterdir()}
    assert left == "unfinished"


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_error_is_told_and_nothing_is_left(
    tmp_path: Path, quiet: Progress, workers: int, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two shards, of which the second fails at once and the first late.
    monkeypatch.setattr(shards, "SHARD_BYTES", 800_000)
    good = json.dumps({"text": "one good line " * 50}) + "\n"
    (tmp_path / "a.jsonl").write_text(good * 1100 + "bad\n")
    (tmp_path / "b.jsonl").write_text("bad\n" + good * 100)
    entries = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    with pytest.raises(Refused, match=r"a\.jsonl:1101: data.corpus = .*the line is no JSON") as refused:
        make(entries, tmp_path / "out", quiet, workers, tokenizer=str(tokenizer_file))
    assert len(refused.value.problems) == 1
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_folder_is_found_by_the_same_call_and_by_no_other(inputs: list[str], tmp_path: Path, quiet: Progress) -> None:
    out = tmp_path / "out"
    first = make(inputs, out, quiet)
    before = contents(out)
    assert make(inputs, out, quiet, workers=2).cached
    assert make(inputs, out, quiet).hash == first.hash
    with pytest.raises(Refused, match=r"--out = .*out: holds token files of other inputs"):
        make(inputs, out, quiet, vocab=399)
    with pytest.raises(Refused, match=r"--out = .*out: holds token files of other inputs"):
        make(inputs[:1], out, quiet)
    assert contents(out) == before


def test_an_out_that_is_something_else_is_refused(inputs: list[str], tmp_path: Path, quiet: Progress) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for name in ("file", "full"):
        with pytest.raises(Refused, match=rf"--out = .*{name}: exists, and is not a folder that trigrid prepared"):
            make(inputs, tmp_path / name, quiet)
    (tmp_path / "empty").mkdir()
    assert not make(inputs, tmp_path / "empty", quiet).cached
    with pytest.raises(Refused, match=r"data.corpus = .*empty: is token files already"):
        make([str(tmp_path / "empty")], tmp_path / "again", quiet)


def test_too_little_disk_is_told_before_the_work(
    inputs: list[str], tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr("trigrid.data.build.write_parts", lambda *args: pytest.fail("began"))
    with pytest.raises(Refused, match=r"--out = .*about \d\.\d MiB are needed here, and 0\.0 MiB are free"):
        make(inputs, tmp_path / "out", quiet, tokenizer=str(tokenizer_file))
