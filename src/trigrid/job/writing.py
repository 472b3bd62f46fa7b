"""Jobs and values as TOML."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import tomli_w

from trigrid.job.keys import Table
from trigrid.spec.job import Job


def dump_job(job: Job) -> str:
    """`job` as TOML with every field written out, which `load_job` reads back to an equal job."""
    return tomli_w.dumps(plain(job))


def plain(value: Any) -> Table:
    """A dataclass as tables of TOML values, without the fields that are None."""
    return {
        name: plain(inner) if isinstance(inner, dict) else list(inner) if isinstance(inner, tuple) else inner
        for name, inner in (value if isinstance(value, dict) else asdict(value)).items()
        if inner is not None
    }


def one_line(value: Any) -> str:
    """A single value, or an array of such, as TOML writes it on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(one_line, value))}]"
    return tomli_w.dumps({"": value}).partition(" = ")[2].rstrip("\n")
