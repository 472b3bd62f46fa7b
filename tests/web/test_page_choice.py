"""Choosing and taking away on the planner page, in Chromium."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.planner import FIRST, entry, tile, turn, turned
from playwright.sync_api import Page, Route, expect

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LIE = """() => {
    const canvas = document.querySelector('#scatter canvas');
    const frame = canvas.getBoundingClientRect();
    const chart = Chart.getChart(canvas), area = chart.chartArea;
    const points = chart.getDatasetMeta(0).data;
    const buttons = [...document.querySelectorAll('#scatter .dot')].map((dot) => dot.getBoundingClientRect());
    return frame.right < innerWidth && points.length === buttons.length && points.every(({ x, y }, i) =>
        x >= area.left - 1 && x <= area.right + 1 && y >= area.top - 1 && y <= area.bottom + 1 &&
        Math.abs(frame.left + x - buttons[i].left - buttons[i].width / 2) < 1 &&
        Math.abs(frame.top + y - buttons[i].top - buttons[i].height / 2) < 1);
}"""
INKS = """() => {
    const chart = Chart.getChart(document.querySelector('#scatter canvas'));
    return [chart.options.scales.x.ticks.color, chart.data.datasets[0].pointBorderColor];
}"""
Planner = Callable[..., Page]


def searched(page: Page) -> None:
    """Waits until the search has answered."""
    page.wait_for_selector("#scatter .dot.front", timeout=60_000)
    page.wait_for_selector("#choice:not([aria-busy])")


def test_find_the_best_fills_the_dials_and_says_why(planner: Planner) -> None:
    page = planner()
    before = tile(page, "Step").inner_text()
    turned(page, lambda: page.get_by_role("button", name="Find the best").click())
    expect(page.locator("#finding")).to_contain_text("legal layouts")
    assert tile(page, "Step").inner_text() != before
    searched(page)
    assert page.locator("#whys li").count() > 3
    expect(page.locator("#whys li").first).to_contain_text("—")
    # What is on the dials is the recommended now.
    expect(page.locator("#dials .recommend[data-shown]")).to_have_count(0)


def test_the_search_works_around_a_lock(planner: Planner) -> None:
    page = planner()
    turned(page, lambda: page.get_by_role("button", name="Lock Pipeline parallel (PP)").click())
    turned(page, lambda: page.get_by_role("button", name="Find the best").click())
    expect(entry(page, "Pipeline parallel (PP)")).to_have_value("4")
    turned(page, lambda: page.get_by_role("button", name="Unlock 1").click())
    turned(page, lambda: page.get_by_role("button", name="Find the best").click())
    expect(entry(page, "Pipeline parallel (PP)")).not_to_have_value("4")


def test_a_recommended_value_is_marked_and_taken(planner: Planner) -> None:
    page = planner()
    advice = page.get_by_role("button", name="Use the recommended Pipeline parallel (PP)")
    advice.wait_for(timeout=60_000)
    best = advice.inner_text().removeprefix("▴ ")
    turned(page, advice.click)
    expect(entry(page, "Pipeline parallel (PP)")).to_have_value(best)


def test_a_point_of_the_front_is_loaded_and_the_way_back_leads_home(planner: Planner) -> None:
    page = planner()
    page.locator("#choice").scroll_into_view_if_needed()
    searched(page)
    home = page.locator("#command").inner_text()
    page.locator("#choice summary").click()
    rows = page.locator("#choice-table tbody tr")
    rows.first.wait_for()
    assert rows.count() >= page.locator("#scatter .dot.front").count() > 0
    point = page.locator("#scatter .dot.front").last
    point.focus()
    turned(page, lambda: page.keyboard.press("Enter"))
    assert page.locator("#command").inner_text() != home
    page.wait_for_timeout(400)
    turned(page, page.go_back)
    assert page.locator("#command").inner_text() == home


def test_a_point_is_loaded_by_the_pointer(planner: Planner) -> None:
    page = planner()
    page.locator("#choice").scroll_into_view_if_needed()
    searched(page)
    point = page.locator("#scatter .dot.front").last
    expect(point).to_have_attribute("title", re.compile("tokens/s"))
    home = page.locator("#command").inner_text()
    turned(page, point.click)
    assert page.locator("#command").inner_text() != home


def test_buttons_lie_on_the_points(planner: Planner) -> None:
    """The library draws the points, in whatever size and colours the page has."""
    page = planner()
    page.locator("#choice").scroll_into_view_if_needed()
    searched(page)
    page.wait_for_function("() => document.querySelectorAll('#scatter .dot.front').length >= 6", timeout=120_000)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(LIE)
    inks = page.evaluate(INKS)
    page.get_by_role("button", name="Dark theme").click()
    page.wait_for_function(f"before => JSON.stringify(({INKS})()) !== JSON.stringify(before)", arg=inks)
    page.wait_for_function(LIE)


def test_the_front_goes_on_with_less_memory(planner: Planner) -> None:
    """Layout by layout, only in sight, to the end, and once."""
    page = planner()
    asked: list[dict[str, Any]] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if "smaller" in request.url else None)
    page.wait_for_selector("#scatter .dot.front", state="attached", timeout=60_000)
    page.wait_for_timeout(500)
    assert asked == []
    page.locator("#choice").scroll_into_view_if_needed()
    expect(page.locator("#front-say")).not_to_be_empty()
    expect(page.locator("#front-say")).to_be_empty(timeout=120_000)
    page.locator("#choice summary").click()
    rows = page.locator("#choice-table tbody tr", has_text="front").filter(has_not_text="among")
    rows.first.wait_for()
    gib = [float(row.locator("td").nth(1).inner_text()) for row in rows.all()]
    assert len(gib) == page.locator("#scatter .dot.front").count() > 5
    assert gib == sorted(gib, reverse=True)
    assert [body["than_bytes"] for body in asked] == sorted((body["than_bytes"] for body in asked), reverse=True)
    before = len(asked)
    page.locator("#sensitivity").scroll_into_view_if_needed()
    page.locator("#choice").scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    assert len(asked) == before


def test_a_notch_is_tried(planner: Planner) -> None:
    page = planner()
    page.locator("#sensitivity").scroll_into_view_if_needed()
    row = page.locator("#sensitivity-table tbody tr", has_text="ZeRO stage 1 → 2")
    row.wait_for()
    expect(row).to_contain_text("%")
    turned(page, row.get_by_role("button", name="Try ZeRO stage at 2").click)
    expect(page.get_by_role("radiogroup", name="ZeRO stage").get_by_role("radio", name="2")).to_be_checked()


def test_the_nearest_layout_that_fits(planner: Planner) -> None:
    page = planner("model=llama3-8b&gpus=8&tp=1&pp=1&zero=0&global-batch=8&seq=8192&recompute=none")
    expect(page.locator("#verdict")).to_have_text("✕ DOES NOT FIT")
    expect(page.locator("#memory-say")).to_contain_text("DOES NOT FIT")
    page.locator("#fitting").scroll_into_view_if_needed()
    load = page.locator("#fitting-list").get_by_role("button").first
    load.wait_for(timeout=90_000)
    turned(page, load.click)
    expect(page.locator("#verdict")).not_to_have_text("✕ DOES NOT FIT")


def test_two_layouts_are_pinned_and_compared(planner: Planner) -> None:
    page = planner()
    page.get_by_role("button", name="Pin as A").click()
    expect(page.locator("#pins-say")).to_contain_text("same layout")
    step = tile(page, "Step").inner_text()
    turn(page, "Pipeline parallel (PP)", 8)
    expect(page.locator("#pins-say")).to_contain_text("Pipeline parallel (PP) 4 → 8")
    row = page.locator("#pins-table tbody tr", has_text="Step")
    expect(row.locator("td").nth(0)).to_have_text(step)
    expect(row.locator("td").nth(1)).to_have_text(tile(page, "Step").inner_text())
    turned(page, lambda: page.get_by_role("button", name="Swap").click())
    expect(entry(page, "Pipeline parallel (PP)")).to_have_value("4")


def test_a_size_alone_and_a_config_are_models(planner: Planner, tmp_path: Path) -> None:
    page = planner()
    turned(page, lambda: (page.locator("#model-size").fill("13"), page.locator("#model-size").press("Enter")))
    expect(page.locator("#model-shape")).to_contain_text("layers")
    assert "--params 13B" in page.locator("#command").inner_text()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    turned(page, lambda: page.locator("#group-model input[type=file]").set_input_files(file))
    expect(page.locator("#model-shape")).to_contain_text("12 layers of width 1,024")
    file.write_text("[1]")
    page.locator("#group-model input[type=file]").set_input_files(file)
    expect(page.locator("#group-model .why")).to_contain_text("is no config.json")


def test_a_config_is_dropped_on_the_page(planner: Planner) -> None:
    page = planner()
    drop = """text => {
        const data = new DataTransfer();
        data.items.add(new File([text], "config.json", { type: "application/json" }));
        document.body.dispatchEvent(new DragEvent("dragover", { dataTransfer: data, bubbles: true, cancelable: true }));
        const seen = !document.getElementById("drop").hidden;
        document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        return seen;
    }"""
    turned(page, lambda: page.evaluate(drop, json.dumps(CONFIG)))
    expect(page.locator("#model-shape")).to_contain_text("12 layers of width 1,024")


def test_the_command_line_gives_the_same_plan(planner: Planner) -> None:
    page = planner()
    words = shlex.split(page.locator("#command").inner_text())
    assert words[:2] == ["trigrid", "plan"]
    ran = subprocess.run([sys.executable, "-m", *words, "--json"], capture_output=True, text=True, timeout=120)
    plan = json.loads(ran.stdout)
    assert plan["layout"]["dp"] == int(tile(page, "Data parallel").inner_text())
    shown = page.locator("#memory-legend .sums b").first.inner_text()
    assert f"{max(s['total_bytes'] for s in plan['memory']['stages']) / 2**30:.1f}" == shown


FILES = {"job.toml": tomllib.loads, "Plan as JSON": json.loads, "Chrome trace": json.loads}


def test_files_to_take_away(planner: Planner) -> None:
    page = planner()
    for label, reader in FILES.items():
        with page.expect_download(timeout=60_000) as waiting:
            page.get_by_role("button", name=label).click()
        assert reader(Path(waiting.value.path()).read_text())  # type: ignore[operator]


@pytest.mark.parametrize(
    ("label", "flag"),
    [("Megatron-LM", "--tensor-model-parallel-size 8"), ("torchtitan", "tensor_parallel_degree = 8")],
)
def test_flags_for_other_trainers(planner: Planner, label: str, flag: str) -> None:
    page = planner()
    page.get_by_role("button", name=f"Flags for {label}").click()
    expect(page.locator("#flags pre")).to_contain_text(flag)


def test_the_link_is_copied(planner: Planner) -> None:
    page = planner(permissions=["clipboard-read", "clipboard-write"])
    page.wait_for_timeout(400)
    page.get_by_role("button", name="Copy link").click()
    assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_published_runs_tell_measured_and_predicted(planner: Planner) -> None:
    page = planner()
    menu: Any = page.get_by_role("combobox", name="Open a published run")
    page.wait_for_selector(".run")
    assert page.locator(".run").count() >= 4
    turned(page, lambda: menu.select_option(label="Llama 3 405B on 16,384 GPUs"))
    expect(tile(page, "Data parallel")).to_have_text("128")
    row = page.locator(".run", has_text="405B").locator("tbody tr").first
    expect(row).to_contain_text("%")


def test_the_timeline_names_what_is_under_the_pointer(planner: Planner) -> None:
    page = planner()
    canvas = page.locator("#lanes canvas")
    canvas.scroll_into_view_if_needed()
    expect(page.locator("#timeline-say")).to_contain_text("35 microbatches")
    box = canvas.bounding_box()
    assert box
    page.mouse.move(box["x"] + 62, box["y"] + 16)
    expect(page.locator("#lane-tip")).to_contain_text("rank 0: forward of microbatch 0, stage 0")
    for _ in range(3):
        page.get_by_role("button", name="Zoom in").click()
    canvas.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#lane-tip")).to_contain_text("rank 1:")
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#lane-tip")).to_contain_text("of 4 ranks busy")
    page.get_by_role("button", name="Stop").click()
    page.locator("#timeline summary").click()
    expect(page.locator("#timeline-table tbody tr")).to_have_count(4)


def test_a_broken_golden_rule_tells_its_cost_and_is_mended(planner: Planner) -> None:
    page = planner(FIRST.replace("tp=8", "tp=16"))
    page.locator("#cluster").scroll_into_view_if_needed()
    rule = page.locator("#rules li[data-holds=no]")
    expect(rule).to_contain_text("costs")
    turned(page, rule.get_by_role("button", name="Mend").click)
    expect(entry(page, "Tensor parallel (TP)")).to_have_value("8")
    expect(page.locator("#rules li[data-holds=no]")).to_have_count(0)


def test_a_broken_link_is_told(planner: Planner, open_page: Callable[..., Page], server: str) -> None:
    page = open_page(f"{server}/#model=llama3-8b&gpus=many")
    page.wait_for_selector("main[data-turn]")
    expect(page.locator("#link-trouble")).to_contain_text("gpus")
    page.watch.faults.clear()  # type: ignore[attr-defined]


def test_panels_ask_nothing_of_a_state_that_is_not_known_to_be_legal(planner: Planner) -> None:
    """Its refusal would stand in the console; a newer state is legal only once its plan is there."""
    page = planner()
    page.locator("#timeline").scroll_into_view_if_needed()
    expect(page.locator("#timeline-say")).not_to_be_empty()
    waiting: list[Route] = []
    page.route("**/api/plan", lambda route: waiting.append(route))
    field = entry(page, "Tensor parallel")
    field.fill("7")
    field.press("Enter")
    page.locator("#fitting").scroll_into_view_if_needed()
    page.wait_for_timeout(1000)
    turned(page, lambda: [route.continue_() for route in waiting])
