"""A sound job file, and what loading one says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from trigrid.errors import Refused
from trigrid.job import load_job
from trigrid.spec.job import Job

JOB = """\
[model]
name = "own"
hidden = 64
layers = 4
heads = 8
kv_heads = 4
head_dim = 8
ffn = 128
vocab = 512
context = 64

[batch]
global_batch = 48
sequence = 32
micro_batch = 1

[parallel]
tp = 2
zero = 2

[run]
steps = 10
"""
NO_ENV: Mapping[str, str] = MappingProxyType({})


def write(folder: Path, text: str) -> str:
    (folder / "job.toml").write_text(text, encoding="utf-8")
    return str(folder / "job.toml")


def load(
    folder: Path, text: str = JOB, *arguments: str, world: int | None = None, env: Mapping[str, str] = NO_ENV
) -> Job:
    return load_job(write(folder, text), arguments, world, env)


def refusal(
    folder: Path, text: str = JOB, *arguments: str, world: int | None = None, env: Mapping[str, str] = NO_ENV
) -> list[str]:
    """The messages of the refusal, with the folder cut off their places."""
    with pytest.raises(Refused) as refused:
        load(folder, text, *arguments, world=world, env=env)
    return [str(p).replace(f"{folder}/", "") for p in refused.value.problems]
