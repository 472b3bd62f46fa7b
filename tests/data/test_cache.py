from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from trigrid.data.cache import build_once, cache_root
from trigrid.data.progress import Progress, Stopped, watch
from trigrid.errors import Refused


def fill(workshop: Path, whole: Path) -> None:
    (whole / "a").write_text("whole")


def make(
    folder: Path, build: Callable[[Path, Path], None], progress: Progress, plan: str = "plan", key: str = "data.cache"
) -> bool:
    return build_once(folder, plan, build, Path.is_dir, key, progress)


def test_the_folder_is_the_one_given_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_root("~/given") == Path("/home/someone/given")
    assert cache_root("") == Path("/caches/trigrid")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root("") == Path("/home/someone/.cache/trigrid")


def test_built_once_and_nothing_else_is_left(tmp_path: Path, quiet: Progress) -> None:
    folder = tmp_path / "new" / "name"
    assert make(folder, fill, quiet) is False
    assert make(folder, lambda workshop, whole: pytest.fail("built twice"), quiet) is True
    assert (folder / "a").read_text() == "whole"
    assert os.listdir(folder.parent) == ["name"]


def test_what_is_refused_leaves_nothing(tmp_path: Path, quiet: Progress) -> None:
    def refuse(workshop: Path, whole: Path) -> None:
        (workshop / "part").touch()
        fill(workshop, whole)
        raise Refused([])

    with pytest.raises(Refused):
        make(tmp_path / "name", refuse, quiet)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_is_interrupted_goes_on_and_another_plan_may_not_take_its_place(
    tmp_path: Path, quiet: Progress, error: BaseException
) -> None:
    seen: list[list[str]] = []

    def build(workshop: Path, whole: Path) -> None:
        seen.append(sorted(os.listdir(workshop)))
        assert os.listdir(whole) == []
        (workshop / "part").touch()
        (whole / "half").touch()
        raise error

    for _ in range(2):
        with pytest.raises((KeyboardInterrupt, Refused)):
            make(tmp_path / "name", build, quiet, "plan")
    with pytest.raises(Refused, match="what a call with other inputs left unfinished"):
        make(tmp_path / "name", fill, quiet, "other")
    assert seen == [["plan", "whole"], ["part", "plan", "whole"]]
    assert os.listdir(tmp_path) == [".name.partial"]
    assert make(tmp_path / "name", fill, quiet, "plan") is False
    assert os.listdir(tmp_path) == ["name"]


def test_two_at_once_build_once_and_the_other_says_that_it_waits(tmp_path: Path, quiet: Progress) -> None:
    building, built = threading.Event(), []
    said: list[str] = []

    def slow(workshop: Path, whole: Path) -> None:
        building.set()
        deadline_s = time.monotonic() + 20
        while not said and time.monotonic() < deadline_s:
            time.sleep(0.01)
        built.append(whole)
        fill(workshop, whole)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(make, tmp_path / "name", slow, quiet)
        building.wait()
        second = pool.submit(make, tmp_path / "name", slow, lambda stage, done, total: said.append(stage))
        assert (first.result(), second.result()) == (False, True)
    assert len(built) == 1
    assert "waiting" in said[0]
    assert os.listdir(tmp_path) == ["name"]


def test_many_at_once_build_once(tmp_path: Path, quiet: Progress) -> None:
    built: list[int] = []

    def build(workshop: Path, whole: Path) -> None:
        built.append(1)
        fill(workshop, whole)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: make(tmp_path / "name", build, quiet), range(8)))
    assert (len(built), sorted(results)) == (1, [False] + [True] * 7)


def test_a_killed_process_leaves_its_work_and_no_lock(tmp_path: Path, quiet: Progress) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from trigrid.data.cache import build_once\n"
        "def build(workshop, whole):\n"
        "    (workshop / 'part').touch(); (whole / 'junk').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_once(Path(sys.argv[1]), 'plan', build, Path.is_dir, 'data.cache', print)\n"
    )
    folder = tmp_path / "name"
    assert subprocess.run([sys.executable, "-c", program, str(folder)], check=False).returncode == -signal.SIGKILL
    assert not folder.exists()

    def go_on(workshop: Path, whole: Path) -> None:
        assert (workshop / "part").exists()
        fill(workshop, whole)

    assert make(folder, go_on, quiet) is False
    assert os.listdir(folder) == ["a"]
    assert os.listdir(tmp_path) == ["name"]


def test_killed_after_the_folder_has_its_name_only_the_rest_is_removed(tmp_path: Path, quiet: Progress) -> None:
    (tmp_path / "name").mkdir()
    (tmp_path / ".name.partial" / "parts").mkdir(parents=True)
    assert make(tmp_path / "name", lambda workshop, whole: pytest.fail("built again"), quiet) is True
    assert os.listdir(tmp_path) == ["name"]


def test_a_place_that_cannot_hold_a_cache_is_refused(tmp_path: Path, quiet: Progress) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=r"data.cache = .*file: (File exists|Not a directory)"):
        make(tmp_path / "file" / "name", fill, quiet)

    def disk_full(workshop: Path, whole: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(Refused, match=r"--out = .*No space left on device"):
        make(tmp_path / "name", disk_full, quiet, key="--out")
    assert not (tmp_path / "name").exists()


def test_watching_ticks_in_this_thread_and_passes_results_and_errors() -> None:
    ticks: list[tuple[float, int]] = []
    begin_s = time.monotonic()
    stop = threading.Event()
    result = watch(
        lambda: time.sleep(1.7) or "done", lambda: ticks.append((time.monotonic(), threading.get_ident())), stop
    )
    assert result == "done"
    assert {thread for _, thread in ticks} == {threading.get_ident()}
    moments = [begin_s, *(moment for moment, _ in ticks), time.monotonic()]
    assert len(ticks) >= 2
    assert max(b - a for a, b in pairwise(moments)) < 2
    with pytest.raises(ZeroDivisionError):
        watch(lambda: 1 // 0, lambda: None, stop)
    assert not stop.is_set()


def test_an_interrupt_stops_the_work_that_is_watched() -> None:
    stop, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert stop.wait(20)
        ended.set()
        raise Stopped

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(work, interrupt, stop)
    assert ended.is_set()
