"""Lines are whole, whatever ends the process or fills the disk."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from trigrid.report.lines import LineFile, read_lines


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    LineFile(tmp_path / "a", pytest.fail).write("step", loss=math.nan, norm=-math.inf, lr=0.5, step=3)
    (entry,) = read_lines(tmp_path / "a")
    assert (entry["kind"], entry["loss"], entry["norm"], entry["lr"], entry["step"]) == ("step", None, None, 0.5, 3)


def test_lines_are_whole_when_the_process_is_killed(tmp_path: Path) -> None:
    """Longer ones than a buffer of the file would hold, too."""
    code = (
        "import os, signal; from pathlib import Path; from trigrid.report.lines import LineFile\n"
        f"file = LineFile(Path({str(tmp_path / 'a')!r}), print)\n"
        "for step in range(3): file.write('step', step=step, text='x' * 20_000)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert (tmp_path / "a").read_text().endswith("}\n")
    assert [entry["step"] for entry in read_lines(tmp_path / "a")] == [0, 1, 2]


def test_a_full_disk_costs_lines_and_one_warning(tmp_path: Path) -> None:
    """What it took of a line is taken back."""
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom trigrid.report.lines import LineFile\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\nfile = LineFile(Path(sys.argv[1]), print)\n"
        "for _ in range(20):\n    file.write('step', loss=1.0)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (warning,) = done.stdout.splitlines()
    assert warning.startswith(f"{tmp_path / 'a'} cannot be written: ")
    lines = (tmp_path / "a").read_text().splitlines()
    assert 2 < len(lines) < 20
    assert all(json.loads(line)["loss"] == 1.0 for line in lines)
