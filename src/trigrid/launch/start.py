"""What is started, whatever starts it: the command of a rank, its environment, its files."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trigrid.errors import Problem, Refused
from trigrid.launch.options import Options
from trigrid.spec.job import Job

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class Mount:
    """A folder (or, in Kubernetes, a claim of a volume) that a container sees at `target`."""

    source: str
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


@dataclass(frozen=True)
class Start:
    """name: of the job; file: its path; overrides: of its values; arguments: of `trigrid train` besides; python: that
    runs it; folder: where it starts; gpus: each rank takes one; restarts: after failures; image: a container's, if any;
    environment: variable → value."""

    name: str
    file: Path
    overrides: tuple[str, ...]
    arguments: tuple[str, ...]
    python: str
    folder: Path
    gpus: bool
    restarts: int
    image: str | None
    mounts: tuple[Mount, ...]
    environment: Mapping[str, str]

    @property
    def command(self) -> tuple[str, ...]:
        """Of every rank. A module in the folder must not stand in for one of the library's: -P."""
        return (self.python, "-P", "-m", "trigrid", "train", str(self.file), *self.overrides, *self.arguments)


def start_of(
    job: Job, file: Path, overrides: Sequence[str], options: Options, arguments: Sequence[str], restarts: int
) -> Start:
    """What is started of `job`, as this process stands: its folder, its interpreter. Raises Refused for options that
    are none."""
    if restarts < 0:
        raise Refused([Problem("--max-restarts", restarts, "must be 0 or more", (0,))])
    return Start(
        # A name that every scheduler takes.
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-.") or "job",
        file=file.absolute(),
        overrides=tuple(overrides),
        arguments=tuple(arguments),
        python=options.python or ("python3" if options.container else sys.executable),
        folder=Path.cwd(),
        gpus=job.run.device != "cpu",
        restarts=restarts,
        image=options.container,
        mounts=_mounts(options.mount),
        environment=_environment(options.env),
    )


def _mounts(texts: Sequence[str]) -> tuple[Mount, ...]:
    """Mounts of SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro. Raises Refused where one is none of them."""
    found = []
    for text in texts:
        match text.split(":"):
            case [source] if source.startswith("/"):
                found.append(Mount(source, source))
            case [source, target] if source and target.startswith("/"):
                found.append(Mount(source, target))
            case [source, target, "ro"] if source and target.startswith("/"):
                found.append(Mount(source, target, read_only=True))
            case _:
                reason = "is no mount: SOURCE:TARGET or SOURCE:TARGET:ro, with an absolute path for TARGET, is expected"
                raise Refused([Problem("--mount", text, reason, ("/data:/data:ro",))])
    return tuple(found)


def _environment(texts: Sequence[str]) -> dict[str, str]:
    """Variables of NAME=VALUE, or NAME for its value here. Raises Refused where one is neither."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not NAME.fullmatch(name):
            raise Refused([Problem("--env", text, "is no NAME=VALUE")])
        if not equals and name not in os.environ:
            raise Refused([Problem("--env", text, "is not set here, and no value is given", (f"{name}=…",))])
        found[name] = value if equals else os.environ[name]
    return found


def assignments(environment: Mapping[str, str]) -> Iterator[str]:
    """The variables as lines of a shell."""
    return (f"export {name}={shlex.quote(value)}" for name, value in environment.items())
