"""The source that one module of this package needs, found by its imports, as a zip that any Python can run."""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import trigrid

PACKAGE = Path(trigrid.__file__).parent
DATA = (".toml", ".csv")
"""What modules read that lies beside them."""


def needed(module: str) -> dict[str, Path]:
    """Every module of this package that `module` may import while it runs, itself among them, and its file; imports
    for type checkers alone do not count."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file(name)
        if file is None or name in found:
            continue
        found[name] = file
        parent = name.rpartition(".")[0]
        package = name if file.name == "__init__.py" else parent
        waiting += [parent, *_imports(ast.parse(file.read_text(encoding="utf-8")), package)]
    return dict(sorted(found.items()))


def packed(module: str, beside: Sequence[str] = ()) -> bytes:
    """A zip of these modules, of the data that lies in their folders, and of the packages `beside` as they are
    installed; equal sources give equal bytes."""
    files = set(needed(module).values())
    for folder in {file.parent for file in files} - {PACKAGE}:
        files |= {file for file in folder.rglob("*") if file.suffix in DATA}
    names = {file.relative_to(PACKAGE.parent).as_posix(): file for file in files}
    for package in beside:
        spec = find_spec(package)
        assert spec
        assert spec.origin
        folder = Path(spec.origin).parent
        names |= {file.relative_to(folder.parent).as_posix(): file for file in folder.rglob("*.py")}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, file in sorted(names.items()):
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, file.read_bytes())
    return out.getvalue()


def _file(module: str) -> Path | None:
    """The file of a module of this package; None of a name in a module, and of others' modules."""
    parts = module.split(".")
    if parts[0] != PACKAGE.name:
        return None
    place = PACKAGE.joinpath(*parts[1:])
    return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=other):
                for child in other:
                    yield from _imports(ast.Module([child], []), package)
                continue
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=name, names=names, level=level):
                parts = package.split(".")
                origin = ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])]) if level else name
                yield from (f"{origin}.{alias.name}" for alias in names)
                yield str(origin)
        yield from _imports(node, package)
