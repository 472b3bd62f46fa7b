"""Libraries that only some data needs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from trigrid.errors import Problem, Refused


def library(module: str, key: str, value: object) -> ModuleType:
    """The module; raises Refused, naming what asks for it (`key` = `value`), where its library is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise
        reason = f"needs the library {error.name}, which is not installed: pip install 'trigrid[data]'"
        raise Refused([Problem(key, value, reason)]) from None
