"""The files of the page: its own, and the chart library that a package of PyPI carries."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

CHARTS = "lib/Chart.bundle.js"
"""Chart.js, as chartkick has it."""


def page_files() -> dict[str, Traversable]:
    """Where each file of the page is, by its address below the page's.

    Raises ModuleNotFoundError where the chart library is not installed.
    """
    own = {entry.name: entry for entry in (files("trigrid.web") / "page").iterdir() if entry.is_file()}
    carried = files("chartkick")
    # Its licence goes where it goes.
    licences = {f"lib/{entry.name}": entry for entry in (carried / "licenses").iterdir()}
    return own | licences | {CHARTS: carried / "django" / "static" / "chartkick" / "Chart.bundle.js"}
