"""The source that goes into a site runs by itself, and nothing else of the package comes with it."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trigrid.web import sources
from trigrid.web.sources import needed, packed

PLAN = "trigrid.plan.api"
SMALL = {
    "__init__.py": "import sys",
    "a.py": "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nfrom trigrid.room import b\n"
    "if TYPE_CHECKING:\n    from trigrid import never\nelse:\n    import trigrid.chosen\n"
    "def f():\n    from .late import g\n    return g",
    "never.py": "",
    "chosen.py": "import rich",
    "late.py": "g = 1",
    "alone.py": "from trigrid import a",
    "room/__init__.py": "from . import c\nfrom .d import e",
    "room/b.py": "from ..room.c import x\nfrom .. import other",
    "room/c.py": "x = 1",
    "room/d.py": "e = 2",
    "room/words/some.toml": "",
    "room/words/some.txt": "",
    "other.py": "",
}


def test_what_is_needed_is_found_by_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In functions and by relative names too; not what only type checkers import, nor who imports the module."""
    for name, text in SMALL.items():
        (tmp_path / "trigrid" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "trigrid" / name).write_text(text)
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "trigrid")
    expected = ["", ".a", ".chosen", ".late", ".other", ".room", ".room.b", ".room.c", ".room.d"]
    assert [*needed("trigrid.a")] == [f"trigrid{name}" for name in expected]
    names = zipfile.ZipFile(io.BytesIO(packed("trigrid.a"))).namelist()
    assert [name for name in names if not name.endswith(".py")] == ["trigrid/room/words/some.toml"]


def test_the_zip_runs_without_the_package(tmp_path: Path) -> None:
    """In an interpreter without site-packages, where nothing but the standard library is there."""
    content = packed(PLAN)
    assert content == packed(PLAN)
    zipfile.ZipFile(io.BytesIO(content)).extractall(tmp_path)
    code = "from trigrid.plan import api; print(api.__file__, api.plan('llama3-8b', 'h100').fits())"
    command = [sys.executable, "-S", "-P", "-c", code]
    run = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(tmp_path / "trigrid" / "plan" / "api.py"), "False"]
