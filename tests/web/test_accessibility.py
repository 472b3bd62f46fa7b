"""axe-core finds nothing serious on the page: light, dark, on a phone, with what is illegal, and of a run; and nothing
is wider than the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.in_process import quick, train
from helpers.runs import run_dir, write_job
from helpers.web import AXE, need_npm, serving
from playwright.sync_api import Page, expect

from trigrid.web.npm import unpacked

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
ANSWERED_MS = 30_000
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""Pixels by which the page is wider than what it is shown in."""


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    need_npm()
    return (unpacked(AXE) / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`trigrid web` with the folder of a short run that recorded a step."""
    job = write_job(tmp_path_factory.mktemp("run"))
    train(job, *quick(6, **{"run.trace-step": 3, "run.validate-every": 2}))
    with serving(run_dir(job)) as address:
        yield address


def findings(page: Page, axe: str) -> list[str]:
    """Serious and critical findings, each with the first places that it is about."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']} ({rule['impact']}): {node['html'][:160]} {node.get('failureSummary', '')}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"][:4]
    ]


def settled(page: Page) -> Page:
    """The planner with an answer, and every panel scrolled by and opened."""
    expect(page.locator("#answer[data-turn]")).to_be_attached(timeout=ANSWERED_MS)
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    for panel in page.locator("#answer > *").all():
        panel.scroll_into_view_if_needed()
    expect(page.locator("#sensitivity-table tbody tr").first).to_be_attached(timeout=ANSWERED_MS)
    page.wait_for_load_state("networkidle")
    return page


@pytest.mark.parametrize("look", LOOKS)
def test_the_planner(server: str, open_page: Callable[..., Page], axe: str, look: str) -> None:
    page = settled(open_page(f"{server}#model=llama3-70b&gpus=64&tp=8&pp=4", **LOOKS[look]))
    assert page.evaluate(WIDER) == 0
    assert findings(page, axe) == []


def test_what_is_illegal(server: str, open_page: Callable[..., Page], axe: str) -> None:
    page = open_page(f"{server}#model=llama3-70b&gpus=64&tp=7&pp=4")
    expect(page.locator("#problems")).to_be_visible(timeout=ANSWERED_MS)
    assert findings(page, axe) == []


@pytest.mark.parametrize("look", LOOKS)
def test_a_run(run_server: str, open_page: Callable[..., Page], axe: str, look: str) -> None:
    page = open_page(run_server, **LOOKS[look])
    expect(page.locator("#run[data-told]")).to_be_visible(timeout=ANSWERED_MS)
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    assert page.evaluate(WIDER) == 0
    assert findings(page, axe) == []


def test_a_finding_is_seen(server: str, open_page: Callable[..., Page], axe: str) -> None:
    page = settled(open_page(server))
    page.evaluate("document.body.append(document.createElement('input'))")
    assert any(told.startswith("label (critical)") for told in findings(page, axe))
