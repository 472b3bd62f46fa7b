"""The rooms and their order: who may import whom, and what never loads torch.

The imports are read from the source, so those inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "trigrid"
PURE = ("errors", "spec", "grid", "blueprint", "schedule", "ledger", "plan")
TOOLS = ("job", "report", "launch", "web")
TORCH = ("engine", "models", "data", "checkpoint", "train", "check")
ROOMS = (*PURE, *TOOLS, *TORCH, "cli")
LONGEST_FILE = 450
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    """The room of `trigrid.room.…`; "" for the package itself. `python -m trigrid` is the command line."""
    name = [*module.split("."), ""][1]
    return "cli" if name == "__main__" else name


def module_of(file: Path) -> str:
    parts = file.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_folder: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that `source` imports, wherever in the code."""
    package = module.split(".") if is_folder else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=name, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                origin = ".".join([*base, *([name] if name else [])])
                # What is imported from the package itself may be a room.
                for alias in names:
                    yield node.lineno, f"{origin}.{alias.name}" if origin == "trigrid" else origin
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def faults(source: str, module: str, is_folder: bool = False) -> list[str]:
    """What `source`, as the file of `module`, does against the order of the rooms."""
    room = room_of(module)
    if room and room not in ROOMS:
        return [f"{module}: no room is called {room}; the rooms are {', '.join(ROOMS)}"]
    found = []
    for line, name in imports(source, module, is_folder):
        top, other = name.split(".")[0], room_of(name)
        if top == "trigrid" and other in ROOMS and (not room or ROOMS.index(other) > ROOMS.index(room)):
            found.append(f"{module}:{line} imports {name}, a room below it")
        if top != "trigrid" and (room in PURE or not room) and top not in sys.stdlib_module_names:
            found.append(f"{module}:{line} imports {name}, and a pure room has the standard library only")
        if top == "torch" and room in TOOLS:
            found.append(f"{module}:{line} imports {name}, and a tools room never does")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found.append(f"{module}:{node.lineno} imports *")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_file(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert faults(source, module_of(file), file.name == "__init__.py") == []
    assert source.count("\n") <= LONGEST_FILE, "two subjects, two files"


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("trigrid.spec.a", "from trigrid.grid import Grid", "trigrid.grid, a room below it"),
        ("trigrid.spec.a", "import trigrid.plan.cost", "trigrid.plan.cost, a room below it"),
        ("trigrid.spec.a", "from trigrid import grid", "trigrid.grid, a room below it"),
        ("trigrid.spec.a", "from ..grid import Grid", "trigrid.grid, a room below it"),
        ("trigrid.spec.a", "from .. import errors, grid", "trigrid.grid, a room below it"),
        ("trigrid.job", "def f():\n    from trigrid.engine import comm", "trigrid.engine, a room below it"),
        ("trigrid", "from trigrid.errors import Refused", "trigrid.errors, a room below it"),
        ("trigrid.plan.a", "def f():\n    import numpy.linalg", "standard library only"),
        ("trigrid.plan.a", "from importlib import import_module\nimport_module('rich')", "standard library only"),
        ("trigrid.plan.a", "import importlib\nimportlib.import_module('rich.table')", "standard library only"),
        ("trigrid.ledger", "if TYPE_CHECKING:\n    from torch import Tensor", "standard library only"),
        ("trigrid.report.a", "def f():\n    import torch.distributed as dist", "a tools room never does"),
        ("trigrid.spec.a", "from math import *", "imports *"),
        ("trigrid.cellar", "", "no room is called cellar"),
    ],
)
def test_a_fault_is_seen(module: str, source: str, complaint: str) -> None:
    (fault,) = faults(source, module)
    assert complaint in fault


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("trigrid.grid", "import math\nfrom trigrid.spec.layout import Layout\nfrom trigrid import __version__"),
        ("trigrid.plan.a", "from . import b\nfrom .b import c\nfrom ..ledger import Ledger"),
        ("trigrid.job", "import pydantic\nfrom trigrid.spec.rules import check"),
        ("trigrid.engine.a", "import torch"),
        ("trigrid.cli", "from trigrid.train import trainer"),
    ],
)
def test_what_is_allowed(module: str, source: str) -> None:
    assert faults(source, module) == []


def test_relative_imports_of_a_folder() -> None:
    assert faults("from .a import b\nfrom ..spec import c", "trigrid.plan", is_folder=True) == []
    assert len(faults("from ..engine import c", "trigrid.plan", is_folder=True)) == 1


def loaded(*modules: str) -> set[str]:
    """Which heavy modules a fresh interpreter has loaded after importing `modules`."""
    code = f"import sys, {', '.join(modules)}\nprint(*({{'torch', 'numpy', 'tokenizers'}} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SRC)
    return set(run.stdout.split())


def test_importing_the_package_and_jobs_loads_nothing_heavy() -> None:
    assert loaded("trigrid") == set()
    assert loaded("trigrid.job") == set()


def test_no_pure_and_no_tools_module_loads_anything_heavy() -> None:
    """Nor does the command line, which imports what it needs when a command runs."""
    light = [m for m in map(module_of, FILES) if room_of(m) in {*PURE, *TOOLS, "cli"} and m != "trigrid.__main__"]
    assert loaded(*light) == set()
    assert loaded("numpy") == {"numpy"}
