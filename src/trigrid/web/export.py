"""The planner as a folder of files for any web server: the page, this package's source, and a Python that runs it in
the visitor's browser. Nothing is asked of any server but the files themselves."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import trigrid
from trigrid.errors import Problem, Refused
from trigrid.web.files import page_files
from trigrid.web.npm import PYODIDE, unpacked
from trigrid.web.questions import QUESTIONS
from trigrid.web.sources import packed

HERE = Path(__file__).parent
MARK = "trigrid-site.json"
"""Lies in each export: its version and the SHA-256 of each of its files."""
ENTRY = "trigrid.web.questions"
BESIDE = ("tomli_w",)
"""Packages that the questions need and that are Python alone."""
RUNTIME = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
    "package.json",
)
"""Its package.json tells its licence and where its source is."""
POLICY = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; img-src 'self' data: blob:; object-src 'none'"
HEAD = '<meta charset="utf-8">'


def export_site(folder: Path, say: Callable[[str], object]) -> None:
    """Write the site to `folder`, which is not there, or empty, or an unchanged earlier export, which is replaced.

    It is made aside and renamed when it is whole. `say` is told of progress, and of sizes at the end. Raises Refused
    where `folder` holds anything else or cannot be written.
    """
    folder = folder.resolve()
    _check(folder)
    files = _page()
    say(f"{PYODIDE.called}: Python for the browser")
    runtime = unpacked(PYODIDE)
    files |= {f"pyodide/{name}": (runtime / name).read_bytes() for name in RUNTIME}
    say("the page and the package's source")
    files["trigrid.zip"] = packed(ENTRY, BESIDE)
    try:
        _write(folder, files)
    except OSError as error:
        raise Refused([Problem("export", folder, f"cannot be written: {error.strerror}")]) from None
    for name, size in _sizes(files).items():
        say(f"{size / 1e6:8.2f} MB  {name}")
    say(f"{folder}: serve it with any web server, such as  python -m http.server --directory {folder}")


def _page() -> dict[str, bytes]:
    """The files of the page, with a transport that answers in the browser."""
    found = {name: file.read_bytes() for name, file in sorted(page_files().items())}
    found |= {file.name: file.read_bytes() for file in sorted((HERE / "site").iterdir()) if file.is_file()}
    slow = [name for name, question in QUESTIONS.items() if question.slow]
    found["slow.js"] = f"export const SLOW = new Set({json.dumps(slow)});\n".encode()
    index = found["index.html"].decode()
    assert index.count(HEAD) == 1
    policy = f'{HEAD}\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    found["index.html"] = index.replace(HEAD, policy).encode()
    return found


def _check(folder: Path) -> None:
    """Refuse a folder in which a person may have something of their own."""
    reason = None
    if folder.exists() and not folder.is_dir():
        reason = "is no folder"
    elif folder.is_dir() and any(folder.iterdir()):
        reason = _foreign(folder)
    if reason:
        raise Refused([Problem("export", folder, f"{reason}; give a folder that is empty or not there yet")])


def _foreign(folder: Path) -> str | None:
    """What in `folder` is not of an export, or has been changed since; None where that is nothing."""
    try:
        marked = json.loads((folder / MARK).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"has files and is no export of this command (no {MARK})"
    for file in sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()):
        name = file.relative_to(folder).as_posix()
        if name != MARK and (name not in marked or file.is_symlink() or _hash(file.read_bytes()) != marked[name]):
            return f"is an export with a file that is not as it was written: {name}"
    return None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as aside:
        new, old = Path(aside) / "new", Path(aside) / "old"
        for name, content in files.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        mark = {"trigrid": trigrid.__version__, "files": {name: _hash(content) for name, content in files.items()}}
        (new / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise


def _sizes(files: Mapping[str, bytes]) -> dict[str, int]:
    """Bytes by what they are, and of all."""
    runtime = sum(len(content) for name, content in files.items() if name.startswith("pyodide/"))
    source = len(files["trigrid.zip"])
    total = sum(map(len, files.values()))
    return {
        "Python (Pyodide)": runtime,
        "trigrid": source,
        "page": total - runtime - source,
        f"in {len(files) + 1} files": total,
    }
