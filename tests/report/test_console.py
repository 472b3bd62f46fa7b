"""What is said, on a terminal, in a file and to nobody."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from trigrid.report import console as module
from trigrid.report.console import Console, Pace, PhaseProgress, duration, table


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_words() -> None:
    assert [duration(s) for s in (0, 42, 187, 19_200, 1_047_600)] == ["0s", "42s", "3m07s", "5h20m", "12d03h"]
    assert table(["a", "bb"], [["ccc", "d"]]) == "a    bb\nccc   d"


def test_all_is_said_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.say("one\ntwo")
    console.heading("  step")
    console.warn("three")
    assert capsys.readouterr() == ("", "one\ntwo\n  step\nwarning: three\n")


def test_quiet_leaves_warnings(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    console = Console(quiet=True)
    console.say("one")
    console.heading("step")
    console.warn("three")
    with console.waiting("nothing"), console.progress() as progress:
        progress("counting", 1, 3)
        clock.now_s += 60
        progress("counting", 2, 3)
    assert capsys.readouterr() == ("", "warning: three\n")


def test_a_line_after_two_seconds_then_ever_less_often(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with PhaseProgress(Console()) as progress:
        for second in range(1, 100):
            clock.now_s += 1
            progress("reading (bytes)", second * 1000, 100_000)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"reading (bytes): {second * 1000:,} of 100,000" for second in (2, 6, 14, 30, 60, 90)]


def test_each_phase_is_given_its_two_seconds(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with PhaseProgress(Console()) as progress:
        for phase in ("one", "two"):
            progress(phase, 0, 0)
            clock.now_s += 1.9
            progress(phase, 1, 0)
        clock.now_s += 0.2
        progress("two", 12_345, 0)
    assert capsys.readouterr().err == "two: 12,345\n"


def test_progress_is_quiet_where_nothing_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().progress() as progress:
        for i in range(1000):
            progress("counting", i, 1000)
    assert capsys.readouterr().err == ""


def test_waiting_tells_how_long_it_has_been(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "TICK_S", 0.01)
    with Console().waiting("joining 8 ranks"):
        time.sleep(0.1)
    assert capsys.readouterr().err.splitlines()[0] == "joining 8 ranks: 0s"


def test_waiting_passes_errors_on_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Console().waiting("dividing"):
        _ = 1 / 0
    assert capsys.readouterr().err == ""


def test_a_pace_starts_at_its_first_interval(clock: Clock) -> None:
    pace = Pace()
    assert not pace.due()
    clock.now_s += module.PATIENCE_S
    assert pace.due()
    assert not pace.due()


ON_A_TERMINAL = """
from trigrid.report.console import Console
console = Console()
assert console.on_terminal and console.width == 120
with console.progress() as progress:
    progress("steps", 1, 3, "loss 5.0000")
    console.heading("  step     loss")
    progress("steps", 2, 3, "loss 4.0000")
    progress("validation", 1, 4)
    progress.hide("validation")
    console.say("a line")
    console.warn("careful")
    print("an early result")
print("the result")
"""


def on_terminal(code: str, **env: str) -> tuple[str, str]:
    """Standard output, a pipe, and standard error, a terminal of 120 columns, of a Python program."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    given = {**os.environ, "TERM": "xterm-256color", **env}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True, env=given
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65_536)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert process.stdout
    out = process.stdout.read()
    assert process.wait() == 0, seen.decode()
    return out, seen.decode()


def test_a_terminal_has_bars_and_keeps_its_cursor() -> None:
    out, err = on_terminal(ON_A_TERMINAL)
    assert out == "an early result\nthe result\n"
    assert "━" in err
    assert "2 of 3" in err
    assert "loss 4.0000" in err
    for line in ("a line", "warning: careful"):
        assert f"\x1b[2K{line}\r\n" in err
    assert "step     loss" in err
    hidden, shown = err.index("\x1b[?25l"), err.index("\x1b[?25h")
    assert hidden < shown < err.index("steps"), "a killed process must not take the cursor along"
    assert err.count("\x1b[?25l") == 1


def test_no_escape_codes_where_there_is_no_terminal() -> None:
    """FORCE_COLOR is set by many CI services."""
    code = ON_A_TERMINAL.replace("assert console", "assert not console").replace("120", "80")
    for env in ({"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})
        assert done.returncode == 0, done.stderr
        assert done.stderr == "  step     loss\na line\nwarning: careful\n"


def test_saying_loads_no_library() -> None:
    code = (
        "import sys; from trigrid.report.console import Console; Console().say('a'); assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
