"""A package of the npm registry, unpacked in this user's cache: when something is built, pinned, and checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

from trigrid.errors import Problem, Refused

LIMIT_S = 300


@dataclass(frozen=True)
class Package:
    """integrity: "sha512-" and the Base64 of its archive's SHA-512, as a lock file of npm has it."""

    name: str
    version: str
    integrity: str

    @property
    def called(self) -> str:
        return f"{self.name}@{self.version}"


PYODIDE = Package(
    "pyodide",
    "314.0.7",
    "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A==",
)
"""CPython 3.14 for WebAssembly."""


def unpacked(package: Package, cache: Path | None = None) -> Path:
    """The folder with the package's files, fetched with `npm pack` where the cache has none; npm knows the registry.

    Raises Refused where npm is missing or fails, or the archive is not the pinned one.
    """
    cache = cache or _cache()
    # By its content, so that a new pin never finds the files of an old one.
    folder = cache / f"{package.name}-{package.version}-{hashlib.sha256(package.integrity.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    if shutil.which("npm") is None:
        reason = "has to be fetched with npm, which is not installed here (Debian: apt-get install npm)"
        raise Refused([Problem("npm", package.called, reason)])
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as aside:
        archive = _fetched(package, Path(aside))
        found = "sha512-" + b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != package.integrity:
            reason = f"what npm fetched is another file: {found} instead of {package.integrity}"
            raise Refused([Problem("npm", package.called, reason)])
        with tarfile.open(archive) as files:
            files.extractall(aside, filter="data")
        try:
            # All archives of npm hold one folder of this name.
            (Path(aside) / "package").rename(folder)
        except OSError:
            # Another process was quicker.
            if not folder.is_dir():
                raise
    return folder


def _fetched(package: Package, folder: Path) -> Path:
    command = ["npm", "pack", package.called, "--pack-destination", str(folder), "--ignore-scripts", "--loglevel=error"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder)
    except subprocess.TimeoutExpired:
        raise Refused([Problem("npm", package.called, f"npm pack took more than {LIMIT_S} s")]) from None
    archives = list(folder.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = f"npm pack failed: {lines[0] if lines else f'exit code {done.returncode}'}"
        raise Refused([Problem("npm", package.called, reason)])
    return archives[0]


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "trigrid" / "npm"
