"""Pictures of the planner page for docs/images: a server of its own, Chromium, one PNG for each of SHOTS.

    python tools/screenshots.py [--run RUN_DIR] [NAME …]

NAME: of the pictures to take, by default all; with --run also the page of that run. Needs playwright and a Chromium on
the PATH.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.web import FLAGS, browser_path, serving

IMAGES = Path(__file__).parent.parent / "docs" / "images"
LARGEST_BYTES = 300_000
LLAMA = (
    "model=llama3-405b&gpus=16384&tokens=15T&tp=8&pp=16&virtual=7&schedule=interleaved&zero=1"
    "&recompute=full&seq=8192&global-batch=2048"
)
SMALL = "model=llama3-8b&gpus=64&tp=8&pp=4&zero=1&schedule=1f1b&global-batch=70&seq=8192"


@dataclass(frozen=True)
class Shot:
    """part: a section to take alone, by its id; the window where it is empty. typed: what is entered first, at which
    dial."""

    name: str
    query: str
    part: str = ""
    width: int = 1440
    height: int = 900
    scheme: str = "light"
    scale: float = 1.0
    typed: tuple[str, str] | None = None


SHOTS = (
    Shot("planner-light", LLAMA),
    Shot("planner-dark", LLAMA, scheme="dark"),
    Shot("planner-phone", LLAMA, width=390, height=844, scale=1.5),
    Shot("planner-illegal", SMALL, typed=("Tensor parallel (TP)", "3")),
    Shot("planner-pipeline", SMALL, part="timeline"),
    Shot("planner-cluster", LLAMA, part="cluster"),
    Shot("planner-zero", LLAMA, part="zero"),
    Shot("planner-choice", SMALL, part="choice"),
    Shot("planner-runs", SMALL, part="presets", scheme="dark"),
)


def take(browser: Browser, address: str, shot: Shot) -> None:
    """One picture, once every question of the page is answered."""
    context = browser.new_context(
        viewport={"width": shot.width, "height": shot.height},
        color_scheme=shot.scheme,  # type: ignore[arg-type]
        device_scale_factor=shot.scale,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(f"{address}/#{shot.query}")
    page.wait_for_selector("#answer[data-turn]", timeout=300_000)
    if shot.typed:
        label, value = shot.typed
        quiet(page)
        field = page.get_by_role("textbox", name=label).first
        field.fill(value)
        field.press("Enter")
        page.wait_for_selector("#problems:not([hidden])")
    if shot.part:
        part = page.locator(f"#{shot.part}")
        part.scroll_into_view_if_needed()
        quiet(page)
        save(part.screenshot(), shot.name)
    else:
        quiet(page)
        save(page.screenshot(), shot.name)
    context.close()


def quiet(page: Page) -> None:
    """Waits for the search that follows a rest, and for what its answer changes."""
    page.wait_for_timeout(1_500)
    page.wait_for_selector("#choice:not([aria-busy])", timeout=300_000)
    page.wait_for_function("() => !document.querySelector('#front-say').textContent", timeout=300_000)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)


def save(image: bytes, name: str) -> None:
    assert len(image) < LARGEST_BYTES, f"{name} has {len(image)} bytes"
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / f"{name}.png").write_bytes(image)
    print(f"{name}.png: {len(image) / 1000:.0f} kB", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*(shot.name for shot in SHOTS), []], default=[])
    parser.add_argument("--run", default="")
    asked = parser.parse_args()
    run, shots = asked.run, [shot for shot in SHOTS if not asked.names or shot.name in asked.names]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=list(FLAGS))
        with serving() as address:
            for shot in shots:
                take(browser, address, shot)
        if run:
            with serving(run) as address:
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                page.goto(address)
                page.wait_for_selector("#run[data-told]", timeout=300_000)
                save(page.screenshot(), "run-light")
        browser.close()


if __name__ == "__main__":
    main()
