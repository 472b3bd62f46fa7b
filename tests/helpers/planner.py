"""Hands on the planner page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

FIRST = "model=llama3-8b&gpus=64&tp=8&pp=4&zero=1&schedule=1f1b&global-batch=70&seq=8192&recompute=none"
"""The scenario of the mission: 64 GPUs, TP 8, PP 4."""


def entry(page: Page, label: str) -> Locator:
    """Where the value of a dial is typed."""
    return page.get_by_role("textbox", name=label, exact=False).first


def slider(page: Page, label: str) -> Locator:
    return page.get_by_role("slider", name=label, exact=True)


def tile(page: Page, name: str) -> Locator:
    """A figure of the answer."""
    return _tile(page, name).locator("strong")


def small(page: Page, name: str) -> Locator:
    """What stands under it."""
    return _tile(page, name).locator("small")


def _tile(page: Page, name: str) -> Locator:
    return page.locator(".tile", has=page.locator(".name", has_text=re.compile(f"^{re.escape(name)}$")))


def turned(page: Page, act: Callable[[], object]) -> None:
    """Does `act` and waits until its answer is on the page."""
    before = page.locator("#answer").get_attribute("data-turn")
    act()
    page.wait_for_function(
        "before => document.querySelector('#answer').dataset.turn !== before", arg=before, timeout=60_000
    )


def turn(page: Page, label: str, value: object) -> None:
    """Types a value into the entry of a dial."""
    field = entry(page, label)
    turned(page, lambda: (field.fill(str(value)), field.press("Enter")))
