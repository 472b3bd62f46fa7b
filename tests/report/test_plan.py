"""How plans and searches read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trigrid.plan.api import plan, search
from trigrid.plan.around import reasons, recompute_table, sensitivity
from trigrid.plan.plan import DOES_NOT_FIT, SAFE, TIGHT, Plan
from trigrid.plan.software import POLICIES
from trigrid.report.plan import memory_wall, plan_text, policy_text, short_text, verdict
from trigrid.report.search import layout_text, recompute_text, search_json, search_lines, sensitivity_text
from trigrid.report.units import days, figures, scaled, seconds
from trigrid.spec.layout import Layout


def planned(**changes: object) -> Plan:
    layout = Layout(**{"tp": 8, "pp": 8, "dp": 2, "recompute": "full", **changes})  # type: ignore[arg-type]
    return plan("llama3-70b", "h100", layout, global_batch=32)


def test_the_worst_stage_decides_the_verdict() -> None:
    fits = planned()
    assert verdict(fits) == SAFE
    tight = tuple(replace(stage, verdict=TIGHT) if stage.stage == 3 else stage for stage in fits.stages)
    assert verdict(replace(fits, stages=tight)) == TIGHT
    broken = tuple(replace(stage, verdict=DOES_NOT_FIT) if stage.stage == 0 else stage for stage in tight)
    assert verdict(replace(fits, stages=broken)) == DOES_NOT_FIT


def test_many_stages_are_told_by_their_ends_and_the_fullest() -> None:
    deep = planned(tp=1, pp=40, dp=1)
    lines = plan_text(deep).splitlines()
    ends = [line.split()[0] for line in lines if line.endswith(("SAFE", "TIGHT", "FIT"))]
    rows = [word for word in ends if word.isdigit()]
    assert rows[:2] == ["0", "1"]
    assert rows[-2:] == ["38", "39"]
    assert any("more stages need no more than the fullest" in line for line in lines)
    assert max(map(len, lines)) <= 100


def test_columns_of_memory_sum_to_the_total() -> None:
    table = [line.split() for line in plan_text(planned()).splitlines()]
    (header,) = [words for words in table if words[:2] == ["stage", "layers"]]
    rows = [words for words in table if len(words) == len(header) + 1 and words[0].isdigit()]
    assert len(rows) == 8
    for row in rows:
        numbers = [float(word) for word in row[2:-1]]
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.5)


def test_a_warning_stands_with_its_code_and_cost() -> None:
    text = plan_text(planned(zero=3))
    assert "warning: weights are gathered twice for each of" in text
    assert "[zero-traffic]" in text


def test_the_share_of_time_that_is_productive() -> None:
    """At Llama 3's rate of stops: with 128 GPUs one in 16 days, so a checkpoint every 39 minutes."""
    (line,) = [line for line in plan_text(planned()).splitlines() if line.startswith("  goodput")]
    assert line.startswith("  goodput     99.8%, at one unexpected stop in 16d11h (Llama 3's rate)")
    assert line.endswith("a checkpoint every 39m46s")


def test_the_short_form_has_two_lines() -> None:
    first, second = short_text(planned()).splitlines()
    assert first.startswith("plan: FITS, SAFE: stage ")
    assert first.endswith("of 79.1 GiB")
    assert second.startswith("plan: step ")
    assert "MFU" in second


def test_the_wall_is_the_whole_state_against_one_server() -> None:
    wall = memory_wall(planned())
    assert wall["state_bytes"] == 18 * 70_553_706_496
    assert wall["deficit_bytes"] == wall["state_bytes"] - wall["server_bytes"]
    small = memory_wall(plan("llama3-8b", "h100"))
    assert small["deficit_bytes"] == 0
    assert policy_text(POLICIES["engine"]) == (
        "18 bytes per parameter (policy engine: weights 2, master 4, gradients 4, moments 8)"
    )


def test_a_search_is_told_on_a_page() -> None:
    found = search("llama3-8b", "h100", gpus=16, global_batch=32, sequence=4096)
    lines = search_lines(found, found.plan, reasons(found), (), None, ())
    assert lines[0].startswith(f"  best of {found.counts.legal:,} legal layouts: TP")
    assert any(line.strip().startswith("recompute ") for line in lines)
    assert "  runners-up" in lines
    assert max(map(len, lines)) <= 100
    value = search_json(found, reasons(found), (), None)
    assert value["candidates"]["legal"] == found.counts.legal  # type: ignore[index]
    assert value["spare_gpus"] == 0


def test_a_layout_in_one_line() -> None:
    setup = planned(zero=3, gather="per_step", schedule="interleaved", virtual_stages=2).setup
    assert layout_text(setup) == "TP8 PP8 DP2 ZeRO-3/step interleaved v2 mb1 recompute full"
    assert layout_text(setup._replace(pp=1, cp=4, dp_replicate=2, zero=1)) == (
        "TP8 PP1 CP4 DP2 ZeRO-1 reduce/microbatch ×2 mb1 recompute full"
    )


def test_tables_are_no_wider_than_a_page() -> None:
    job, software = planned().job, planned().software
    around, moves = sensitivity(job, software)
    for text in (sensitivity_text(around, moves), recompute_text(recompute_table(job, software))):
        assert max(map(len, text.splitlines())) <= 100
        assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (seconds(0.0014), "1.40 ms"),
        (seconds(12.345), "12.3 s"),
        (seconds(0.9999), "1.00 s"),
        (figures(1234.5), "1,234"),
        (scaled(405_853_388_800), "405.9B"),
        (scaled(12), "12"),
        (days(36 * 3600), "1.5 days"),
        (days(7200), "2.0 hours"),
    ],
)
def test_numbers_are_told_with_three_figures(told: str, text: str) -> None:
    assert told == text
