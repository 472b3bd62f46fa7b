"""The planner page in Chromium, driven as a person drives it."""

from __future__ import annotations

import re
from collections.abc import Callable

from helpers.planner import FIRST, entry, slider, small, tile, turn, turned
from playwright.sync_api import Page, expect

OpenPage = Callable[..., Page]


def hash_of(page: Page) -> str:
    """The state in the address, once it is written."""
    page.wait_for_timeout(400)
    return str(page.evaluate("location.hash"))


def test_the_first_scenario(planner: OpenPage) -> None:
    page = planner()
    expect(tile(page, "Data parallel")).to_have_text("2")
    expect(tile(page, "Microbatches")).to_have_text("35")
    expect(small(page, "Idle share")).to_have_text("7.9 % if equal")
    expect(page.locator("#verdict")).to_have_text("✓ SAFE")


DIALS = {
    "GPUs": (128, "--gpus 128"),
    "GPUs per node": (16, "--cluster.gpus_per_node 16"),
    "Tensor parallel (TP)": (4, "--tp 4"),
    "Pipeline parallel (PP)": (2, "--pp 2"),
    "Context parallel (CP)": (2, "--cp 2"),
    "Virtual stages": (2, "--virtual 2"),
    "Sequence": (4096, "--seq 4096"),
    "Global batch": (140, "--global-batch 140"),
    "Micro-batch": (5, "--micro-batch 5"),
    "Tokens to train on": ("15T", "--tokens 15T"),
    "NVLink, one way": (300, "--cluster.nvlink_gb_s 300"),
    "NIC of a GPU, one way": (200, "--cluster.nic_gbit 200"),
    "Spine oversubscription": (4, "--cluster.oversubscription 4"),
    "Nodes per leaf switch": (4, "--cluster.nodes_per_leaf 4"),
    "Price of a GPU-hour": (2.5, "--price 2.5"),
    "Power of a GPU": (900, "--cluster.power_w 900"),
    "PUE": (1.1, "--cluster.pue 1.1"),
    "Pieces of the loss": (4, "--parallel.loss_chunks 4"),
    "Units gathered ahead": (2, "--parallel.prefetch 2"),
    "Copies of the shards (HSDP)": (2, "--parallel.dp_replicate 2"),
}


def test_every_entry_turns_its_dial(planner: OpenPage) -> None:
    page = planner()
    page.get_by_text("Advanced").click()
    for label, (value, flag) in DIALS.items():
        turn(page, label, value)
        assert flag in page.locator("#command").inner_text().replace("\n", " "), label
        expect(page.locator("#problems")).to_be_hidden()


CHOICES = (
    ("ZeRO stage", "3", "--zero 3"),
    ("Recomputation", "full", "--recompute full"),
    ("Allocator: expandable segments", "on", "--expandable-segments"),
    ("Weights gathered", "per_step", "--parallel.gather per_step"),
    ("Gather inputs again", "on", "--parallel.regather true"),
    ("Gather inputs again", "off", "--parallel.regather false"),
    ("Precision", "fp32", "--precision fp32"),
    ("Sequence parallelism", "off", "--parallel.sequence_parallel false"),
)


def test_every_choice_turns_its_dial(planner: OpenPage) -> None:
    page = planner()
    page.get_by_text("Advanced").click()
    for label, value, flag in CHOICES:
        radio = page.get_by_role("radiogroup", name=label).get_by_role("radio", name=value, exact=True)
        turned(page, lambda radio=radio: radio.check(force=True))
        assert flag in page.locator("#command").inner_text(), label
    for label, value, flag in (
        ("Gradients reduced", "per_step", "--parallel.reduce per_step"),
        ("Accelerator", "h200", "--gpu h200"),
        ("Pipeline schedule", "gpipe", "--schedule gpipe"),
        ("Bytes per parameter", None, "--policy"),
        ("Software", "megatron", "--software megatron"),
    ):
        choice = page.get_by_role("combobox", name=label)
        option = choice.locator("option").filter(has_text=value) if value else choice.locator("option:not(:checked)")
        name = option.first.inner_text()
        turned(page, lambda choice=choice, name=name: choice.select_option(label=name))
        assert flag in page.locator("#command").inner_text(), label


def test_dials_change_what_they_should(planner: OpenPage) -> None:
    page = planner()
    total = page.locator("#memory-legend .sums b").first
    turn(page, "Global batch", 80)
    held = float(total.inner_text())
    turn(page, "Tensor parallel (TP)", 4)
    expect(tile(page, "Data parallel")).to_have_text("4")
    assert float(total.inner_text()) > held
    page.get_by_text("Advanced").click()
    turn(page, "Price of a GPU-hour", 2)
    expect(small(page, "Cost")).to_contain_text("kWh")
    cost = tile(page, "Cost").inner_text()
    turn(page, "Price of a GPU-hour", 20)
    assert tile(page, "Cost").inner_text() != cost


def test_keyboard_steps_over_values_that_are_not_legal_and_says_why(planner: OpenPage) -> None:
    page = planner()
    dial = slider(page, "Tensor parallel (TP)")
    dial.focus()
    turned(page, lambda: dial.press("ArrowLeft"))
    expect(entry(page, "Tensor parallel (TP)")).to_have_value("4")
    # 3 divides no 32 heads.
    turned(page, lambda: dial.press("ArrowLeft"))
    expect(entry(page, "Tensor parallel (TP)")).to_have_value("2")
    expect(page.locator("#dial-parallel-tp-why")).to_contain_text("3:")
    dial.press("Escape")
    expect(page.locator("#dial-parallel-tp-why")).to_be_hidden()


def test_a_value_that_is_not_legal_is_explained_with_the_way_back(planner: OpenPage) -> None:
    page = planner()
    turn(page, "Tensor parallel (TP)", 3)
    expect(page.locator("#verdict")).to_have_text("✕ NOT LEGAL")
    expect(page.locator("#problems")).to_contain_text("parallel.tp 3")
    expect(entry(page, "Tensor parallel (TP)")).to_have_attribute("aria-invalid", "true")
    turned(page, lambda: page.locator("#problems .way").first.click())
    expect(page.locator("#problems")).to_be_hidden()
    expect(page.locator("#verdict")).not_to_have_text("✕ NOT LEGAL")


def test_a_link_restores_the_state_in_another_browser(planner: OpenPage, open_page: OpenPage) -> None:
    page = planner()
    turn(page, "Pipeline parallel (PP)", 8)
    turned(page, lambda: page.get_by_role("button", name="Lock Pipeline parallel (PP)").click())
    page.get_by_text("Advanced").click()
    turn(page, "Price of a GPU-hour", 3)
    address = page.url.split("#")[0] + hash_of(page)
    other = open_page(address)
    other.wait_for_selector("main[data-turn]")
    expect(entry(other, "Pipeline parallel (PP)")).to_have_value("8")
    expect(other.get_by_role("button", name="Lock Pipeline parallel (PP)")).to_have_attribute("aria-pressed", "true")
    assert other.locator("#command").inner_text() == page.locator("#command").inner_text()
    assert other.locator("#tiles").inner_text() == page.locator("#tiles").inner_text()


def test_the_way_back_leads_to_the_layout_before(planner: OpenPage) -> None:
    page = planner()
    here = page.locator("#command").inner_text()
    run = page.locator(".run").first
    run.wait_for()
    turned(page, lambda: run.get_by_role("button", name="Open on the dials").click())
    assert page.locator("#command").inner_text() != here
    page.wait_for_timeout(400)
    turned(page, lambda: page.go_back())
    assert page.locator("#command").inner_text() == here


def test_by_keyboard_only(planner: OpenPage) -> None:
    page = planner()
    names = []
    for _ in range(60):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate("(e => e.id || e.className?.baseVal || e.className || e.tagName)(document.activeElement)")
        )
    for needed in ("find", "model-name", "dial-gpus", "dial-parallel-tp", "dial-batch-global_batch"):
        assert needed in names, f"{needed} is not reached: {names}"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.locator("#dial-parallel-pp").focus()
    turned(page, lambda: page.keyboard.press("ArrowDown"))
    expect(page.locator("#dial-parallel-pp")).to_have_value("3")


def test_a_phone_scrolls_only_down(planner: OpenPage) -> None:
    page = planner(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    for group in page.locator("details").all():
        group.evaluate("element => { element.open = true; }")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_timeout(1_500)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    expect(page.locator("#brief")).to_contain_text("SAFE")


def test_the_theme_follows_the_system_until_it_is_chosen(planner: OpenPage) -> None:
    page = planner(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Light theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.reload()
    page.wait_for_selector("main[data-turn]")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_nothing_jumps_while_a_dial_turns(planner: OpenPage) -> None:
    page = planner()
    page.wait_for_timeout(1_500)
    page.evaluate(
        """() => {
            window.jumps = 0;
            new PerformanceObserver(list => list.getEntries().forEach(entry => { window.jumps += entry.value; }))
                .observe({ type: "layout-shift" });
        }"""
    )
    page.locator("#dial-parallel-tp").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowUp"):
        turned(page, lambda key=key: page.keyboard.press(key))
        page.wait_for_timeout(250)
    assert page.evaluate("window.jumps") < 0.01


def test_p8_zero_stages_side_by_side_with_bytes_per_parameter(planner: OpenPage) -> None:
    page = planner()
    page.locator("#zero").scroll_into_view_if_needed()
    rows = page.locator("#zero-table tbody tr")
    expect(rows).to_have_count(4)
    expect(page.locator("#zero-say")).to_contain_text("18 bytes per parameter")
    page.locator("#zero summary").click()
    expect(page.locator("#policy-table")).to_contain_text("engine")
    turned(page, lambda: page.get_by_role("button", name="Try ZeRO 3").click())
    expect(page.get_by_role("radiogroup", name="ZeRO stage").get_by_role("radio", name="3")).to_be_checked()


def test_p8_every_figure_explains_itself(planner: OpenPage) -> None:
    page = planner()
    for button in page.locator("#memory-legend button, #time-legend button, .tile:not(:disabled), .meter").all():
        button.click()
        box = page.locator("#explain")
        expect(box.locator(".formula")).not_to_be_empty()
        expect(box.locator(".source")).to_contain_text("Source: ")
        page.keyboard.press("Escape")
        expect(box).to_be_hidden()


def test_p9_first_and_last_stage_show_embedding_and_logits(planner: OpenPage) -> None:
    page = planner()
    bars = page.locator("#bars .bar")
    expect(bars).to_have_count(4)
    expect(bars.nth(0).locator(".ends")).to_have_text("embedding")
    expect(bars.nth(3).locator(".ends")).to_have_text("head")
    heights = [float(bar.locator(".fill-logits").get_attribute("height") or 0) for bar in bars.all()]
    assert heights[3] > 0
    assert heights[:3] == [0, 0, 0]
    bars.nth(3).hover(force=True)
    expect(page.locator("#memory-legend h3")).to_contain_text("head")


def test_the_bars_are_read_by_keyboard(planner: OpenPage) -> None:
    page = planner()
    bars = page.locator("#bars .bar")
    bars.nth(0).focus()
    page.keyboard.press("ArrowRight")
    expect(bars.nth(1)).to_be_focused()
    assert re.match(r"stage 1: .*GiB, SAFE", bars.nth(1).get_attribute("aria-label") or "")
    page.locator("#memory summary").click()
    expect(page.locator("#memory-table tbody tr")).to_have_count(4)


def test_p12_a_measured_value_beside_the_plan(planner: OpenPage) -> None:
    page = planner()
    page.locator("#measured-figure").select_option("memory.allocated")
    page.locator("#measured-value").fill("20")
    expect(page.locator("#residual")).to_contain_text("%")
    page.locator("#measured-value").fill("many")
    expect(page.locator("#residual")).to_contain_text("not a number")


def meters(page: Page) -> tuple[float, float, float]:
    text = page.locator("#memory-legend .note").inner_text()
    allocated, reserved, device = (float(number) for number in re.findall(r"([\d.]+) GiB", text))
    return allocated, reserved, device


def test_p14_reserved_is_never_below_allocated(planner: OpenPage) -> None:
    page = planner()
    page.get_by_text("Advanced").click()
    allocated, reserved, device = meters(page)
    assert allocated <= reserved <= device
    switch = page.get_by_role("radiogroup", name="Allocator: expandable segments").get_by_role("radio", name="on")
    turned(page, lambda: switch.check(force=True))
    after = meters(page)
    assert after[0] == allocated
    assert after[0] <= after[1] < reserved


def test_p34_no_button_computes_and_the_margin_is_named(planner: OpenPage) -> None:
    page = planner()
    assert not re.search("calculate|submit", " ".join(page.get_by_role("button").all_inner_texts()), re.I)
    expect(page.locator("#memory-legend")).to_contain_text("not modelled: margin")
    margins = page.locator("#bars .margin")
    assert all(float(m.get_attribute("height") or 0) > 0 for m in margins.all())
    assert margins.first.get_attribute("fill") == "url(#hatch)"
    assert "±" in page.locator("#memory-say").inner_text()


def test_a_link_to_what_is_not_legal_opens_with_the_way_back(planner: OpenPage) -> None:
    page = planner(f"{FIRST}&parallel.dp_replicate=3")
    expect(page.locator("#verdict")).to_have_text("✕ NOT LEGAL")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_timeout(500)
    # The dials that are not at fault can still be turned.
    turned(page, lambda: page.locator("#problems .way").first.click())
    expect(page.locator("#answer")).to_have_attribute("data-turn", "2")


def test_experts_are_cut(planner: OpenPage) -> None:
    page = planner("model=mixtral-8x7b&gpus=64&tp=1&pp=1&zero=1&global-batch=64&seq=4096")
    turn(page, "Expert parallel (EP)", 4)
    assert "--ep 4" in page.locator("#command").inner_text()
    expect(page.locator("#problems")).to_be_hidden()


OUTSIDE = """() => [...document.querySelectorAll('.panel svg *, #scatter .plot > *')].filter((part) => {
    const box = part.getBoundingClientRect(), panel = part.closest('.panel').getBoundingClientRect();
    return box.width && (box.left < panel.left || box.right > panel.right + 1);
}).map((part) => part.outerHTML)"""


def test_nothing_of_a_chart_lies_outside_its_panel(planner: OpenPage) -> None:
    page = planner()
    page.locator("#choice").scroll_into_view_if_needed()
    page.wait_for_selector("#scatter .limit:not([hidden])", timeout=60_000)
    assert page.evaluate(OUTSIDE) == []
