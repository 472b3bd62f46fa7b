"""`trigrid web` in a process of its own, and a browser that lets nothing wrong pass unseen."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from trigrid.web.npm import Package

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Error, Page, Request

REQUIRED = "NO_SKIPS"
"""Set where a browser test that cannot run is a failure: in CI."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # The network is off: no name but the loopback's is ever resolved.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
AXE = Package(
    "axe-core",
    "4.14.1",
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
)
URL = re.compile(r"http://127\.0\.0\.1:\d+/?")
START_S = 60.0
PLANNER = ("trigrid", "web", "--no-browser", "--port", "0")


def missing(what: str) -> None:
    """End the test that needs `what`: a skip on a person's machine, a failure where nothing may be left out."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"this machine has no {what}, and {REQUIRED} is set")
    pytest.skip(f"this machine has no {what}")


def browser_path() -> str:
    """The Chromium of this machine."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        missing("Chromium (Debian: apt-get install chromium)")
    assert found
    return found


def need_npm() -> None:
    if shutil.which("npm") is None:
        missing("npm (Debian: apt-get install npm)")


@contextmanager
def serving(*arguments: object, module: tuple[str, ...] = PLANNER) -> Iterator[str]:
    """The address of a server started as a user does, which is ended afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *module, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def drain() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        yield _address(lines)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)


def _address(lines: queue.SimpleQueue[str | None]) -> str:
    said, deadline = list[str](), time.monotonic() + START_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            break
        if line is None:
            break
        said.append(line)
        if found := URL.search(line):
            return found.group().rstrip("/")
    raise AssertionError(f"no address was told: {''.join(said)}")


@dataclass
class Watch:
    """What must not happen on a page: errors on its console, requests to another origin. A test that provokes one takes
    it out."""

    origin: str
    faults: list[str] = field(default_factory=list)

    def follow(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", self._error)
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.faults.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _error(self, error: Error) -> None:
        self.faults.append(f"exception: {error}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((f"{self.origin}/", "data:", "blob:")):
            self.faults.append(f"foreign request: {request.url}")
