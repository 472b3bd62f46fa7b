"""What the page offers to choose from and to take away: each leads to a state whose plan is the one that was told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trigrid.errors import Refused
from trigrid.plan.plan import as_json
from trigrid.web.questions import answer
from trigrid.web.questions.catalogue import FIRST

EIGHT: dict[str, Any] = {
    "model": "llama3-8b",
    "gpus": 64,
    "values": {"parallel.tp": 8, "parallel.pp": 4, "batch.global_batch": 70, "batch.sequence": 4096},
}


def test_sensitivity_leads_to_the_states_that_it_tells() -> None:
    rows = answer("sensitivity", {"state": EIGHT})["rows"]
    legal = [row for row in rows if row["legal"]]
    assert len(legal) > 12
    for row in legal[::3]:
        there = answer("plan", {"state": row["state"]})
        assert there["problems"] == [], row
        assert there["figures"]["step_s"]["value"] == pytest.approx(row["step_s"], rel=1e-9), row["words"]
    assert all(row["state"] is None and row["reason"] for row in rows if not row["legal"])


def test_the_best_layout_keeps_what_is_locked() -> None:
    state = {**EIGHT, "values": {**EIGHT["values"], "parallel.zero": 0}, "locked": ["parallel.zero", "parallel.tp"]}
    found = answer("best", {"state": state})
    assert found["fits"]
    assert "parallel.zero" not in found["open"]
    assert found["why"]
    for one in (found, *found["ranked"], *found["front"]):
        assert one["state"]["values"]["parallel.zero"] == 0
        assert one["state"]["values"]["parallel.tp"] == 8
    there = answer("plan", {"state": found["state"]})
    assert there["figures"]["step_s"]["value"] == pytest.approx(found["ranked"][0]["step_s"], rel=1e-9)
    assert found["ranked"][0]["step_s"] <= answer("plan", {"state": state})["figures"]["step_s"]["value"]


def test_where_nothing_fits_the_nearest_is_told() -> None:
    state = {"model": "llama3-70b", "gpus": 8, "values": {"batch.global_batch": 64, "batch.sequence": 4096}}
    found = answer("best", {"state": state})
    assert not found["fits"]
    assert found["state"]
    assert found["ranked"] == []
    assert "none fits" in found["how"]


def test_what_makes_a_layout_fit() -> None:
    state = {"model": "llama3-8b", "gpus": 8, "values": {"batch.global_batch": 64, "parallel.zero": 0}}
    assert answer("plan", {"state": state})["verdict"] == "DOES NOT FIT"
    found = answer("fitting", {"state": state})
    assert not found["fits"]
    assert found["nearest"]["state"]
    for layout in (found["nearest"], *(change["layout"] for change in found["changes"])):
        there = answer("plan", {"state": layout["state"]})
        assert there["verdict"] in ("SAFE", "TIGHT"), layout["words"]
        assert there["figures"]["step_s"]["value"] == pytest.approx(layout["step_s"], rel=1e-9)


def test_golden_rules_and_what_breaking_them_costs() -> None:
    kept = answer("cluster", {"state": EIGHT})
    assert [axis["tier"] for axis in kept["axes"] if axis["axis"] in ("tp", "pp")] == ["NVLINK", "LEAF"]
    assert [tier["name"] for tier in kept["tiers"]] == ["NVLINK", "LEAF", "SPINE"]
    tensor = kept["rules"][0]
    assert tensor["holds"]
    assert tensor["cost_s"] > 0
    broken = answer("cluster", {"state": {**EIGHT, "values": {**EIGHT["values"], "cluster.gpus_per_node": 4}}})
    tensor = broken["rules"][0]
    assert not tensor["holds"]
    assert tensor["state"]["values"]["parallel.tp"] == 4
    assert [gpu["tp"] for gpu in kept["sample"][0]["gpus"]] == list(range(8))


def test_two_plans_compared() -> None:
    other = {**EIGHT, "values": {**EIGHT["values"], "parallel.zero": 3}}
    found = answer("compare", {"a": EIGHT, "b": other})
    assert [one["key"] for one in found["differs"]] == ["parallel.zero"]
    rows = {row["figure"]: row for row in found["rows"]}
    assert rows["memory.weights"]["better"] == "b"
    assert rows["tokens_per_s"]["better"] == "a"
    more = {**EIGHT, "model": "mixtral-8x7b", "tokens": "15T"}
    told = {one["key"]: (one["a"], one["b"]) for one in answer("compare", {"a": EIGHT, "b": more})["differs"]}
    assert told["tokens"] == ("1T", "15T")
    assert told["model.experts.count"] == ("", "8")
    same = answer("compare", {"a": EIGHT, "b": EIGHT})
    assert same["differs"] == []
    assert {row["better"] for row in same["rows"]} == {None}


def test_files_are_those_of_the_command_line(tmp_path: Path) -> None:
    from trigrid.job import load_job
    from trigrid.plan.plan import make_plan

    made = answer("job", {"state": EIGHT})
    (tmp_path / "job.toml").write_text(made["text"])
    job = load_job(tmp_path / "job.toml", env={})
    assert job.parallel.dp == 2
    kept = json.loads(answer("json", {"state": EIGHT})["text"])
    assert {name: kept[name] for name in as_json(make_plan(job))} == json.loads(json.dumps(as_json(make_plan(job))))
    events = json.loads(answer("trace", {"state": EIGHT})["text"])["traceEvents"]
    assert sum(event["ph"] == "X" and event["name"][0] in "FB" for event in events) >= 4 * 70
    assert "--tensor-model-parallel-size 8" in answer("export", {"state": EIGHT, "target": "megatron"})["text"]
    with pytest.raises(Refused, match="such choice"):
        answer("export", {"state": EIGHT, "target": "x"})


def test_presets_are_plans_beside_measurements() -> None:
    found = answer("presets", {})["presets"]
    assert len(found) == 5
    for preset in found:
        there = answer("plan", {"state": preset["state"]})
        assert there["problems"] == []
        for told in preset["figures"]:
            assert there["figures"][told["figure"]]["value"] == pytest.approx(told["predicted"])
            assert told["error"] == pytest.approx(told["predicted"] / told["measured"] - 1)
            assert abs(told["error"]) < 0.15, preset["name"]
        assert bool(preset["source"]) == bool(preset["figures"])


def test_the_page_opens_with_a_layout_that_fits() -> None:
    found = answer("catalogue", {})
    assert found["default"]["model"] == FIRST.model
    assert answer("plan", {"state": found["default"]})["verdict"] == "SAFE"
