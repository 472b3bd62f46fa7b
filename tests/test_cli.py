"""The command line as a whole: what it loads, what its help shows, what it says where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trigrid.cli import app

TINY = Path(__file__).parents[1] / "examples" / "tiny-3d.toml"

HEAVY = ("torch", "numpy", "matplotlib", "plotext", "tokenizers", "datasets", "rich.markdown", "tensorboardX")
COMMANDS = (
    *("train", "parity", "prove", "init", "schema", "data prepare", "data inspect"),
    *("plan", "simulate", "report", "compare", "models", "gpus", "validate", "calibrate"),
    *("checkpoint inspect", "checkpoint verify", "checkpoint convert", "checkpoint reshard", "generate"),
    *("launch", "doctor", "status"),
    "web",
)
LIGHT = (
    ("--help",),
    ("--version",),
    ("train", "--help"),
    ("init", "{folder}/job.toml"),
    ("schema",),
    ("schema", "--markdown"),
    ("web", "--help"),
    ("train", "examples/tiny-3d.toml", "--dry-run"),
    ("train", "examples/tiny-3d.toml", "--tp", "3", "--dry-run"),
    ("launch", "examples/tiny-3d.toml", "--on", "slurm", "--dry-run"),
    ("simulate", "examples/tiny-3d.toml", "--svg", "{folder}/step.svg", "--quiet"),
)
LOADED = """\
import sys
from trigrid.cli import main
sys.argv[0] = "trigrid"
try:
    main()
except SystemExit:
    pass
finally:
    print(*(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_light_commands_load_nothing_heavy(words: tuple[str, ...], tmp_path: Path) -> None:
    """Their start-up is a quarter of a CPU-second; any of these would add more than that to it."""
    program = LOADED.format(heavy=HEAVY).replace("finally:", "finally:\n    sys.stderr.write('\\nloaded: ')")
    program = "import os; os._exit = sys_exit = lambda code: (_ for _ in ()).throw(SystemExit(code))\n" + program
    words = tuple(word.format(folder=tmp_path) for word in words)
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120)
    assert done.stderr.rpartition("loaded: ")[2].split() == []
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_ends_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app([*command.split(), "--help"])
    examples = capsys.readouterr().out.partition("Examples:\n")[2].splitlines()
    assert len(examples) > 1
    assert all(line.startswith("  ") and command in line for line in examples if line.strip())


def test_every_command_is_among_those_tested() -> None:
    names = {name for name in app if not name.startswith("-")}
    assert names == {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data", "inspect", "."), "is neither a folder that trigrid prepared nor"),
        (("data", "inspect", "/"), "is neither a folder that trigrid prepared nor"),
        (("init", ".", "--force"), "JOB = .: is a folder, not a file; nearest legal: job.toml"),
        (("init", "sub/job.toml"), "JOB = sub/job.toml: cannot be written: No such file or directory"),
        (("data", "prepare", "stdlib", "--out", "x", "--workers", "0"), "--workers = 0: must be at least 1"),
        (("data", "prepare", "stdlib", "--out", "x", "--tokenizer", "t", "--vocab", "9"), "--vocab = 9: is"),
        (("train", "nothing.toml"), "job = nothing.toml: there is no such file"),
        (("train", str(TINY), "--parallel.schedule-file", "no.csv"), "no.csv: cannot be read"),
        (("trian",), 'Unknown command "trian". Did you mean "train"?'),
        (("train",), "parameter --job requires an argument"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trigrid", *words], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_that_lacks_a_character_costs_no_result(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "trigrid", "init", "größe.toml", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"job": "größe.toml"}
