"""The documents as a site: it builds without a warning, and a browser loads nothing from elsewhere for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.web import serving
from playwright.sync_api import Page, expect

ROOT = Path(__file__).parents[2]
LOADS = {"src", "srcset", "poster", "data", "background"}
"""Attributes whose address is loaded, with the href of a link; that of an anchor is not."""
FOREIGN = re.compile(r"(?:https?:)?//(?!www\.w3\.org)[\w-]+(?:\.[\w-]+)+")
"""Of w3.org are names of formats (xmlns), at which nothing is looked up."""
NEVER = {
    # Diagrams, of which there are none (and what browsers of before 2020 lack).
    "https://unpkg.com": 'class="mermaid"',
    # Stars and forks, for pages that name a repository.
    "https://api.github.com": 'data-md-component="source"',
}
"""Origin in Material's script → what a page has where it is asked."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it, elsewhere."""
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder))
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    return folder


class Loads(HTMLParser):
    """Addresses that a page has its browser load, and the text of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.code: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        for name, value in attributes:
            if name in LOADS or (tag, name) == ("link", "href"):
                self.addresses.append(value or "")
            elif name == "style":
                self.code.append(value or "")

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.code.append(data)


def origins_in(code: str) -> set[str]:
    """Foreign origins that a script or a style could load: at the beginning of a string or in `url()`."""
    return {found[1] for found in re.finditer(rf"""(?:["'`]|url\()\s*({FOREIGN.pattern})""", code)}


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert {page.stem for page in pages} == {page.stem for page in (ROOT / "docs").glob("*.md")} | {"404"}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loads = Loads(text)
        assert any(address.endswith(".js") for address in loads.addresses)
        assert [address for address in loads.addresses if FOREIGN.match(address)] == [], page
        assert set().union(*map(origins_in, loads.code)) == set(), page
        assert [mark for mark in NEVER.values() if mark in text] == [], page
    styles = [file.read_text(encoding="utf-8") for file in site.rglob("*.css")]
    assert styles
    assert set().union(*map(origins_in, styles)) == set()
    scripts = [file.read_text(encoding="utf-8") for file in site.rglob("*.js")]
    assert set().union(*map(origins_in, scripts)) == NEVER.keys()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('load("https://fonts.example.org/x.css")', {"https://fonts.example.org"}),
        ("a{background:url( //cdn.example.org/x.png)}", {"//cdn.example.org"}),
        ("@import 'http://example.org/x.css'", {"http://example.org"}),
        ("/* see https://example.org */ const half = a // b.c", set()),
    ],
)
def test_what_is_loaded_from_elsewhere_is_seen(code: str, found: set[str]) -> None:
    assert origins_in(code) == found


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with serving("0", "--bind", "127.0.0.1", "--directory", site, module=("http.server",)) as server:
        yield server


def test_the_site_is_read_and_searched_without_a_network(address: str, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{address}/index.html")
    page.get_by_role("link", name="On this machine, or by torchrun").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Launching on this machine")
    # What is typed before its script has run, nobody hears.
    page.wait_for_load_state("load")
    page.get_by_role("textbox", name="Search").fill("SkyPilot")
    page.locator(".md-search-result__link", has_text="Launching with SkyPilot").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Launching with SkyPilot")
    # What comments tell the tests is not for readers.
    assert "not run" not in page.locator("body").inner_text()
