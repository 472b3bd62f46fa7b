"""`trigrid web` as a command: where it listens, what it says, how it ends."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.asking import LARGE, ask
from helpers.web import serving


def command(*words: str, **kwargs: Any) -> subprocess.Popen[str]:
    """`trigrid web` under way."""
    program = [sys.executable, "-m", "trigrid", "web", "--no-browser", *words]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


@pytest.fixture
def started() -> Iterator[subprocess.Popen[str]]:
    # A shell starts what runs in its background with Ctrl-C ignored, and so tests there.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = command("--port", "0", start_new_session=True, preexec_fn=heard)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_it_ends_when_it_is_told(started: subprocess.Popen[str], sign: signal.Signals, code: int) -> None:
    """And with it all that it has started, also a search under way."""
    assert started.stdout
    address = started.stdout.readline().strip()
    assert ask(address, "/api/link", {"query": ""})[0] == 200
    searching = threading.Thread(target=lambda: _left_alone(address))
    searching.start()
    searching.join(1.0)
    started.send_signal(sign)
    started.communicate(timeout=60)
    searching.join(60)
    assert started.returncode == code
    assert _is_over(started.pid), "a process of it is left"


def _left_alone(address: str) -> None:
    """Ask for a search, and be told or not how it ended."""
    with suppress(OSError, http.client.HTTPException):
        ask(address, "/api/best", {"state": LARGE})


def _is_over(session: int) -> bool:
    """Whether all processes of a session end within a while."""
    for _ in range(100):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        threading.Event().wait(0.1)
    return False


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = command("--port", str(taken.getsockname()[1]))
        out, told = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "another program listens on it" in told
    assert out == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--port", "65536"), "port = 65536: must be from 0 to 65535; nearest legal: 65535"),
        (("--port", "x"), "x"),
        (("--host", "no.such.host.invalid"), "is no address of this machine"),
        (("--host", "203.0.113.7", "--port", "0"), "cannot be listened on"),
        (("no-such-run",), "no-such-run"),
        (("some-run", "--export", "no-such-site"), "a run's folder cannot be shown without a server"),
    ],
)
def test_what_cannot_be_served_is_refused(words: tuple[str, ...], told: str) -> None:
    process = command(*words)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert told in said
    assert "Traceback" not in said


def test_who_lets_others_in_is_told_what_they_can_do() -> None:
    process = command("--host", "0.0.0.0", "--port", "0")
    assert process.stdout
    assert process.stderr
    address = process.stdout.readline()
    said = process.stderr.readline()
    process.terminate()
    process.communicate(timeout=60)
    assert address.startswith("http://127.0.0.1:")
    assert "no password" in said
    assert "0.0.0.0" in said


def test_quiet_says_the_address_alone() -> None:
    with serving("--quiet") as address:
        assert ask(address, "/api/catalogue", {})[1]["run"] is None


@pytest.mark.parametrize("flags", [["--no-browser", "--port", "0"], ["--export", "site"]])
def test_without_the_chart_library_the_extra_is_named(flags: list[str], tmp_path: Path) -> None:
    """Before an address is told, and with nothing written."""
    code = "import sys; sys.modules['chartkick'] = None; from trigrid.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "web", *flags], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "trigrid: this command needs chartkick: pip install 'trigrid[web]'" in ended.stderr
    assert list(tmp_path.iterdir()) == []
