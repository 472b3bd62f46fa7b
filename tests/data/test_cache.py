from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from trigrid.data.cache import build_once, cache_root
from trigrid.data.progress import Progress, watch
from trigrid.errors import Refused


def fill(folder: Path) -> None:
    (folder / "a").write_text("whole")


def test_the_folder_is_the_one_given_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_root("~/given") == Path("/home/someone/given")
    assert cache_root("") == Path("/caches/trigrid")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root("") == Path("/home/someone/.cache/trigrid")


def test_built_once(tmp_path: Path, quiet: Progress) -> None:
    folder = tmp_path / "new" / "name"
    assert build_once(folder, fill, quiet) is False
    assert build_once(folder, lambda partial: pytest.fail("built twice"), quiet) is True
    assert (folder / "a").read_text() == "whole"


@pytest.mark.parametrize("error", [KeyboardInterrupt, Refused([])])
def test_an_error_leaves_no_folder(tmp_path: Path, quiet: Progress, error: BaseException) -> None:
    def stop(partial: Path) -> None:
        fill(partial)
        raise error

    with pytest.raises((KeyboardInterrupt, Refused)):
        build_once(tmp_path / "name", stop, quiet)
    assert [path.name for path in tmp_path.iterdir()] == [".name.lock"]


def test_two_at_once_build_once_and_the_other_says_that_it_waits(tmp_path: Path, quiet: Progress) -> None:
    building, built = threading.Event(), []
    said: list[str] = []

    def slow(partial: Path) -> None:
        building.set()
        deadline_s = time.monotonic() + 20
        while not said and time.monotonic() < deadline_s:
            time.sleep(0.01)
        built.append(partial)
        fill(partial)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(build_once, tmp_path / "name", slow, quiet)
        building.wait()
        second = pool.submit(build_once, tmp_path / "name", slow, lambda stage, done, total: said.append(stage))
        assert (first.result(), second.result()) == (False, True)
    assert len(built) == 1
    assert "waiting" in said[0]


def test_what_a_killed_process_left_is_replaced(tmp_path: Path, quiet: Progress) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from trigrid.data.cache import build_once\n"
        "def build(folder):\n"
        "    (folder / 'junk').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_once(Path(sys.argv[1]), build, print)\n"
    )
    folder = tmp_path / "name"
    assert subprocess.run([sys.executable, "-c", program, str(folder)], check=False).returncode == -signal.SIGKILL
    assert (tmp_path / ".name.partial" / "junk").exists()
    assert not folder.exists()
    assert build_once(folder, fill, quiet) is False
    assert os.listdir(folder) == ["a"]
    assert not (tmp_path / ".name.partial").exists()


def test_a_place_that_cannot_hold_a_cache_is_refused(tmp_path: Path, quiet: Progress) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=r"data.cache = .*file: (File exists|Not a directory)"):
        build_once(tmp_path / "file" / "name", fill, quiet)

    def disk_full(partial: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(Refused, match=r"data.cache = .*No space left on device"):
        build_once(tmp_path / "name", disk_full, quiet)
    assert not (tmp_path / "name").exists()


def test_watching_ticks_in_this_thread_and_passes_results_and_errors() -> None:
    ticks: list[tuple[float, int]] = []
    begin_s = time.monotonic()
    result = watch(lambda: time.sleep(1.7) or "done", lambda: ticks.append((time.monotonic(), threading.get_ident())))
    assert result == "done"
    assert {thread for _, thread in ticks} == {threading.get_ident()}
    moments = [begin_s, *(moment for moment, _ in ticks), time.monotonic()]
    assert len(ticks) >= 2
    assert max(b - a for a, b in pairwise(moments)) < 2
    with pytest.raises(ZeroDivisionError):
        watch(lambda: 1 // 0, lambda: None)
