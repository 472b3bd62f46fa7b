"""The fitted constants, each with bounds, unit and provenance, from constants.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

# Generations that no row was fitted for borrow from the nearest one.
NEAREST = {"ada": "ampere", "cdna": "hopper", "blackwell": "hopper"}


@dataclass(frozen=True)
class Constant:
    """value lies in low..high; rows: what it was fitted on, or where it is from."""

    value: float
    low: float
    high: float
    unit: str
    about: str
    rows: str


@cache
def constants() -> Mapping[str, Constant]:
    """Every constant by name."""
    text = (files("trigrid.plan") / "constants.toml").read_text(encoding="utf-8")
    return MappingProxyType({name: Constant(**fields) for name, fields in tomllib.loads(text).items()})


@cache
def shipped() -> Mapping[str, float]:
    """The values by name."""
    return MappingProxyType({name: constant.value for name, constant in constants().items()})


def of_generation(values: Mapping[str, float], name: str, generation: str, suffix: str = "") -> float:
    """The value of `name.generation`, with `.suffix` if there is one, or that of the nearest generation with rows."""
    tail = f".{suffix}" if suffix else ""
    for nearest in (generation, NEAREST.get(generation, "ampere"), "hopper"):
        key = f"{name}.{nearest}{tail}"
        if key in values:
            return values[key]
    raise KeyError(f"no constant {name}.{generation}{tail}")
