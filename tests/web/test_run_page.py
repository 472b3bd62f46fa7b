"""`trigrid web RUN_DIR`: a training that goes on, followed on the page, and read-only endpoints."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from helpers.runs import start, wait_for, write_job
from helpers.web import serving
from playwright.sync_api import Page, expect

from trigrid.job import load_job
from trigrid.plan.plan import as_json, make_plan
from trigrid.report.goodput import account_of
from trigrid.report.history import read_history

STEPS = 60
FLAGS = ("--steps", STEPS, "--precision", "fp32", "--run.trackers=[]", "--checkpoint.every", 20, "--run.trace-step", 10)

HIDE = """hidden => {
    Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
}"""

DRAWN = """() => Chart.getChart(document.querySelector('#run-loss canvas')).data.datasets
    .map((set) => set.data.map(({ x, y }) => [x, y]))"""
"""What the chart library has of the loss."""


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A training of its own process, and the folder of its run, which has begun."""
    job = write_job(tmp_path_factory.mktemp("run"))
    process = start("train", job, *FLAGS)
    try:
        folders = job.parent / "runs"
        wait_for(lambda: process.poll() is not None or list(folders.glob("*/metrics.jsonl")))
        (metrics,) = folders.glob("*/metrics.jsonl")
        yield process, metrics.parent
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def run_server(training: tuple[subprocess.Popen[str], Path]) -> Iterator[str]:
    with serving(training[1]) as address:
        yield address


@pytest.fixture(scope="module")
def ended(training: tuple[subprocess.Popen[str], Path], run_server: str) -> Path:
    """The folder of the run, which has come to its end."""
    process, folder = training
    assert process.wait(120) == 0
    return folder


def get(server: str, path: str, method: str = "GET") -> Any:
    with urlopen(Request(f"{server}{path}", method=method), timeout=60) as response:
        return json.load(response)


def refused(server: str, path: str, method: str = "GET") -> int:
    with pytest.raises(HTTPError) as error:
        get(server, path, method)
    error.value.close()
    return error.value.code


def test_the_page_follows_a_run_to_its_end(
    training: tuple[subprocess.Popen[str], Path], run_server: str, open_page: Callable[..., Page]
) -> None:
    process, folder = training
    page = open_page(run_server)
    tiles = page.locator("#run-tiles")
    expect(page.locator("#run[data-told]")).to_be_visible(timeout=30_000)
    expect(page.locator("#planner")).to_be_hidden()
    expect(tiles).to_contain_text(f"of {STEPS}")
    assert process.wait(120) == 0
    # Nobody reloads it.
    expect(page.get_by_role("heading", name="ENDED")).to_be_visible(timeout=60_000)
    expect(page.locator("#run-headline")).to_contain_text(f"Step {STEPS} of {STEPS}")
    losses, validation = read_history(folder, STEPS)
    expect(tiles).to_contain_text(f"{losses[-1]:.4f}")
    expect(tiles).to_contain_text(f"held-out {validation[-1][1]:.4f} at {STEPS}")
    drawn = page.evaluate(DRAWN)
    assert drawn[0] == [[step, pytest.approx(loss)] for step, loss in enumerate(losses, 1)]
    assert drawn[1] == [[step, pytest.approx(loss)] for step, loss in validation]
    expect(page.locator("#run-stages")).to_contain_text("weights")
    expect(page.locator("#run-timeline canvas")).to_have_count(2)
    expect(page.locator("#run-timeline")).to_contain_text("Measured in step 10")
    expect(page.locator("#run-ranks")).to_contain_text("rank 0")
    expect(page.locator("#run-goodput")).to_contain_text("productive")
    expect(page.locator("#run-events")).to_contain_text(f"all {STEPS} steps are done")


def test_it_is_told_by_keys_and_in_tables(ended: Path, run_server: str, open_page: Callable[..., Page]) -> None:
    page = open_page(run_server)
    chart = page.get_by_role("img", name="Training loss over")
    expect(page.locator("#run[data-told]")).to_be_visible(timeout=30_000)
    chart.focus()
    page.keyboard.press("Home")
    expect(page.locator("#run-loss .tip")).to_contain_text("Step 1: training")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#run-loss .tip")).to_contain_text("Step 2: training")
    box = chart.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
    expect(page.locator("#run-loss .tip")).to_contain_text(f"Step {STEPS}: training")
    page.mouse.move(0, 0)
    expect(page.locator("#run-loss .tip")).to_be_empty()
    page.locator("#run-loss summary").click()
    expect(page.locator("#run-loss tbody tr")).to_have_count(20)


def test_the_planner_is_one_press_away(run_server: str, open_page: Callable[..., Page]) -> None:
    page = open_page(run_server)
    page.get_by_role("button", name="Planner").click()
    expect(page.locator("#planner")).to_be_visible()
    expect(page.locator("#run")).to_be_hidden()
    page.reload()
    expect(page.locator("#planner")).to_be_visible()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#run")).to_be_visible()


def test_a_hidden_page_asks_nothing(ended: Path, run_server: str, open_page: Callable[..., Page]) -> None:
    page = open_page(run_server)
    page.clock.install()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.partition("/api/run")[2]))
    page.reload()
    told = page.locator("#run")
    expect(told).to_have_attribute("data-told", "1", timeout=30_000)
    # It asks again after a while, seen.
    page.clock.fast_forward(60_000)
    expect(told).to_have_attribute("data-told", "2", timeout=30_000)
    page.evaluate(HIDE, True)
    asked.clear()
    page.clock.fast_forward(600_000)
    page.wait_for_timeout(500)
    assert [question for question in asked if question] == []
    page.evaluate(HIDE, False)
    expect(told).to_have_attribute("data-told", "3", timeout=30_000)
    assert any(question.startswith("/progress?since=") for question in asked)


def test_endpoints_tell_what_the_commands_tell(run_server: str, ended: Path) -> None:
    facts = get(run_server, "/api/run")
    job = load_job(ended / "job.toml", env={})
    assert facts["plan"] == json.loads(json.dumps(as_json(make_plan(job))))
    progress = get(run_server, "/api/run/progress")
    assert progress["fresh"] is True
    losses, validation = read_history(ended, STEPS)
    loss = progress["columns"].index("loss")
    assert [row[loss] for row in progress["rows"]] == list(losses)
    assert [tuple(row) for row in progress["validation"]] == validation
    later = get(run_server, f"/api/run/progress?since={progress['cursor']}")
    assert (later["fresh"], later["rows"], later["validation"]) == (False, [], [])
    for stranger in ("", "00000000-1", progress["cursor"][:9] + "999999"):
        assert len(get(run_server, f"/api/run/progress?since={stranger}")["rows"]) == STEPS
    account = account_of(ended, 0.0)
    assert account
    goodput = get(run_server, "/api/run/goodput")["account"]
    assert (goodput["seconds"], goodput["state"]) == (account.seconds, "ended")
    compared = get(run_server, "/api/run/compare")
    weights = next(figure for figure in compared["memory"][0]["figures"] if figure["name"] == "weights")
    assert weights["planned"] == weights["measured"] > 0
    assert weights["gap"] == "equal"
    timeline = get(run_server, "/api/run/timeline")
    assert timeline["figures"]["step"] == 10
    assert len(timeline["measured"][0]["rows"][0]["kind"]) == len(timeline["planned"]["rows"][0]["kind"])


def test_nothing_but_these_is_given(run_server: str, ended: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in ended.rglob("*"))
    for path in (
        "/api/run/job.toml",
        "/api/run/../../etc/passwd",
        "/api/run/%2e%2e/%2e%2e/etc/passwd",
        "/job.toml",
        "/..%2fjob.toml",
        "/api/run/checkpoints",
        f"/{ended}/job.toml",
    ):
        assert refused(run_server, path) in (400, 404)
    for method in ("POST", "PUT", "DELETE"):
        assert refused(run_server, "/api/run", method) in (403, 404, 405, 411, 415)
    assert refused(run_server, "/api/run/progress?since=../../x") in (400, 422)
    assert sorted((path, path.stat().st_mtime_ns) for path in ended.rglob("*")) == before


def test_a_link_out_of_the_folder_is_not_followed(run_server: str, ended: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"traceEvents": []}')
    trace, kept = ended / "trace.json", ended / "trace.kept"
    trace.rename(kept)
    trace.symlink_to(secret)
    try:
        assert refused(run_server, "/api/run/timeline") == 422
    finally:
        trace.unlink()
        kept.rename(trace)
    assert "figures" in get(run_server, "/api/run/timeline")
