from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers.planner import FIRST
from helpers.web import FLAGS, Watch, browser_path, serving
from playwright.sync_api import Browser, Page, expect, sync_playwright

OpenPage = Callable[..., Page]
PATIENCE_MS = 60_000
"""For what a page does at once on an idle machine."""
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of `trigrid web`."""
    with serving() as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests, with a profile of its own; each test has a context of its own in it."""
    path = browser_path()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, headless=True, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens an address as a new visitor, with options of `Browser.new_context`. The test fails where a page has written
    an error to its console or asked another origin for something; `page.watch` has what was seen so far."""
    contexts, watches = [], []

    def open_(url: str, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        parts = urlsplit(url)
        watch = Watch(f"{parts.scheme}://{parts.netloc}")
        watches.append(watch)
        context.on("page", watch.follow)
        page = context.new_page()
        page.watch = watch  # type: ignore[attr-defined]
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [fault for watch in watches for fault in watch.faults] == []


@pytest.fixture
def page(open_page: OpenPage, server: str) -> Page:
    """The planner as a new visitor finds it."""
    return open_page(server)


@pytest.fixture
def planner(open_page: OpenPage, server: str) -> OpenPage:
    """Opens a state of the planner, by default the first scenario, and waits for its answer."""

    def open_(query: str = FIRST, **options: Any) -> Page:
        page = open_page(f"{server}/#{query}", **options)
        page.wait_for_selector("#answer[data-turn]")
        return page

    return open_
