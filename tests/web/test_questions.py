"""What the page asks: each question's answer against the planner's own, and that none fails on any state."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from helpers.page_states import STATES, WILD
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trigrid.errors import Refused
from trigrid.plan.explain import FORMULAS
from trigrid.web.questions import QUESTIONS, answer, reply

EIGHT = {
    "model": "llama3-8b",
    "gpus": 64,
    "values": {"parallel.tp": 8, "parallel.pp": 4, "batch.global_batch": 70, "batch.sequence": 4096},
}
QUICK = sorted(name for name, question in QUESTIONS.items() if not question.slow)
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def plan(state: dict[str, Any], **values: object) -> dict[str, Any]:
    return answer("plan", {"state": {**state, "values": {**state["values"], **values}}})


def test_first_scenario() -> None:
    """64 GPUs, TP 8, PP 4: DP 2; at 35 microbatches equal stages idle for 7.9 % of the pipeline."""
    found = plan(EIGHT)
    assert (found["dp"], found["microbatches"], found["world"], found["spare_gpus"]) == (2, 35, 64, 0)
    assert found["figures"]["idle_share.equal"]["value"] == pytest.approx(3 / 38)
    assert f"{found['figures']['idle_share.equal']['value']:.1%}" == "7.9%"
    assert "35 microbatches" in found["words"]["batch"]


def test_a_plan_is_the_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that an answer gives prints the same plan."""
    from trigrid.cli import app

    found = plan(EIGHT, **{"parallel.zero": 2, "parallel.recompute": "selective", "cluster.nodes_per_leaf": 4})
    words = [*found["command"].split()[1:], "--json"]
    app(words, exit_on_error=False, print_error=False, result_action="return_value")
    printed = json.loads(capsys.readouterr().out)
    assert {name: printed[name] for name in found["plan"]} == json.loads(json.dumps(found["plan"]))


def test_dp_is_what_a_search_would_take() -> None:
    """100 GPUs at TP 8 have room for 12 copies; the batch of 64 goes into 8."""
    found = plan({"model": "llama3-8b", "gpus": 100, "values": {"parallel.tp": 8, "batch.global_batch": 64}})
    assert (found["dp"], found["world"], found["spare_gpus"]) == (8, 64, 36)


def test_an_illegal_layout_is_answered_with_the_way_back() -> None:
    found = plan(EIGHT, **{"parallel.tp": 3})
    assert found["plan"] is None
    (told,) = found["problems"]
    assert told["key"] == "parallel.tp"
    assert told["nearest"] == [2, 4]
    tensor = next(control for control in found["controls"] if control["key"] == "parallel.tp")
    assert tensor["value"] == 3
    legal = {choice["value"]: choice["legal"] for choice in tensor["values"]}
    assert legal[2]
    assert not legal[3]


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"gpus": 8}, "model"),
        ({"model": "llama3-8b", "params": "8B"}, "model"),
        ({"model": "/etc/passwd"}, "model"),
        ({"model": "llama3-8c"}, "model"),
        ({"params": "many"}, "params"),
        ({"config": {"architectures": ["T5ForConditionalGeneration"]}}, "architectures"),
        ({"config": {"x": "y" * 20_000}}, "config"),
        ({"model": "llama3-8b", "gpus": 0}, "gpus"),
        ({"model": "llama3-8b", "gpus": 10**8}, "gpus"),
        ({"model": "llama3-8b", "tokens": "x"}, "tokens"),
        ({"model": "llama3-8b", "software": "x"}, "software"),
        ({"model": "llama3-8b", "policy": "x"}, "policy"),
        ({"model": "llama3-8b", "values": {"cluster.calibration": "/etc/passwd"}}, "cluster.calibration"),
        ({"model": "llama3-8b", "values": {"parallel.schedule_file": "x.csv"}}, "parallel.schedule_file"),
        ({"model": "llama3-8b", "values": {"model.config": "x"}}, "model.config"),
        ({"model": "llama3-8b", "values": {"parallel.tp": "8"}}, "parallel.tp"),
        ({"model": "llama3-8b", "values": {"parallel.tpp": 8}}, "parallel.tpp"),
        ({"model": "llama3-8b", "values": {"model.layers": 2000}, "gpus": 8}, "model.layers"),
        ({"model": "llama3-8b", "values": {"batch.global_batch": 2**21}, "gpus": 8}, "batch.global_batch"),
        ({"model": "llama3-8b", "values": {"cluster.nic_gbit": 1e-308}, "gpus": 8}, "cluster.nic_gbit"),
        ({"model": "llama3-8b", "values": {"cluster.price": 1e308}, "gpus": 8}, "cluster.price"),
        ({"model": "llama3-8b", "tokens": "1e300"}, "tokens"),
        ({"model": "llama3-8b", "values": {f"parallel.tp{n}": 8 for n in range(2000)}}, "values"),
        ({"model": "llama3-8b", "values": {"x" * 200: 8}}, "x" * 200),
        ({"model": "llama3-8b", "values": {"parallel.stage_layers": [1] * 2000}}, "parallel.stage_layers"),
        (
            {"model": "llama3-405b", "values": {"parallel.pp": 126, "batch.global_batch": 4096}, "gpus": 126},
            "parallel.pp",
        ),
    ],
)
def test_what_is_wrong_is_told_by_its_key(state: dict[str, Any], key: str) -> None:
    """No state opens a file, and none is larger than the page can answer at once."""
    found = answer("plan", {"state": state})
    assert found["plan"] is None
    assert key in [told["key"] for told in found["problems"]]


def test_a_body_that_makes_no_sense_is_refused() -> None:
    for name, body in (("plan", {"stat": {}}), ("plan", []), ("nothing", {}), ("plan", {"state": {"gpus": "8"}})):
        with pytest.raises(Refused):
            answer(name, body)
    deep = '{"state": {"config": ' + '{"a": ' * 500 + "1" + "}" * 502
    wide = json.dumps({"state": {f"k{n}": 0 for n in range(5000)}})
    long = json.dumps({"state": {"values": {"x" * 1000: 0}}})
    lone = '{"state": {"model": "\\ud800"}}'
    nothing = ("", "{", '{"state": {"gpus": NaN}}', '{"state": {"gpus": 1e999}}', "[" * 100_000)
    for text in (*nothing, deep, wide, long, lone):
        sound, told = reply("plan", text)
        assert not sound
        assert json.loads(told)["problems"]


def test_the_timeline_is_the_schedule_played() -> None:
    found = answer("timeline", {"state": EIGHT})
    assert found["ranks"] == 4
    assert all(len(row["kind"]) == 70 == len(row["start_s"]) for row in found["rows"])
    assert found["stages_of"] == [[0], [1], [2], [3]]
    planned = plan(EIGHT)["figures"]
    assert found["idle_share"] == pytest.approx(planned["idle_share"]["value"])
    ends = max(max(row["end_s"]) for row in found["rows"])
    assert ends == pytest.approx(found["pipeline_s"])
    assert max(max(row["bytes"]) for row in found["memory"]) < found["ceiling_bytes"]


def test_a_timeline_that_is_too_long_is_refused() -> None:
    state = {"model": "llama3-8b", "gpus": 16, "values": {"parallel.pp": 16, "batch.global_batch": 2000}}
    with pytest.raises(Refused, match="more than the 40,000"):
        answer("timeline", {"state": state})


def test_every_figure_explains_itself() -> None:
    """P8: no figure without formula and source."""
    found = plan(EIGHT)
    for figure in found["figures"]:
        told = answer("explain", {"state": EIGHT, "figure": figure})
        assert told["formula"]
        assert told["source"]
        assert told["inputs"].keys() == set(FORMULAS[figure].inputs)
        assert told["label"]
    with pytest.raises(Refused, match="no figure"):
        answer("explain", {"state": EIGHT, "figure": "memory.everything"})


def test_zero_stages_side_by_side() -> None:
    """P8: ZeRO 0 to 3, each less state than the one before, in bytes per parameter of a named policy."""
    found = answer("zero", {"state": {**EIGHT, "policy": "two-moments"}})
    assert (
        found["policy"]["total"]
        == 12
        == sum(found["policy"][name] for name in ("weights", "master", "gradients", "moments"))
    )
    assert [stage["zero"] for stage in found["stages"]] == [0, 1, 2, 3]
    held = [stage["bytes_per_parameter"] for stage in found["stages"]]
    assert held[0] == pytest.approx(12, rel=1e-3)
    assert held == sorted(held, reverse=True)
    assert held[3] == pytest.approx(6, rel=1e-2)


def test_ends_are_seen_on_the_first_and_last_stage() -> None:
    """P9: embedding and logits stand on the bars of the first and the last stage."""
    found = plan(EIGHT)
    kinds = [[unit["kind"] for unit in stage["units"]] for stage in found["stages"]]
    assert kinds == [["embedding", "llama"], ["llama"], ["llama"], ["llama", "head"]]
    first = found["stages"][0]["units"][0]
    assert first["parameters"] == 128_256 * 4096 // 8
    memory = found["plan"]["memory"]["stages"]
    assert memory[3]["by_category"]["logits"] > 0
    assert all(stage["by_category"]["logits"] == 0 for stage in memory[:3])
    state = sum(memory[0]["by_category"][name] for name in ("weights", "master", "gradients", "optimizer"))
    assert sum(unit["state_bytes"] for unit in found["stages"][0]["units"]) == state
    told = answer("explain", {"state": EIGHT, "figure": "memory.logits", "stage": 3})
    assert told["value"] == memory[3]["by_category"]["logits"]


def test_a_measurement_beside_the_plan() -> None:
    """P12: the residual of a measured value."""
    planned = plan(EIGHT)["figures"]["memory.total"]["value"]
    found = answer("measured", {"state": EIGHT, "figure": "memory.total", "value": planned * 1.25})
    assert found["residual"] == pytest.approx(planned / 4)
    assert found["error"] == pytest.approx(-0.2)
    assert found["within_margin"] is False
    assert answer("measured", {"state": EIGHT, "figure": "memory.total", "value": planned})["within_margin"] is True
    for none in (0, 5e-324):
        sound, text = reply("measured", json.dumps({"state": EIGHT, "figure": "step_s", "value": none}))
        assert sound
        assert json.loads(text)["error"] is None


def test_the_allocator_is_a_dial() -> None:
    """P14: reserved is never below allocated, and growing segments leave less of a gap."""
    gaps = []
    for grown in (False, True):
        found = answer("plan", {"state": {**EIGHT, "expandable_segments": grown}})
        for stage in found["plan"]["memory"]["stages"]:
            assert stage["reserved_bytes"] >= stage["allocated_bytes"]
        gaps.append(sum(stage["by_category"]["allocator"] for stage in found["plan"]["memory"]["stages"]))
        assert ("--expandable-segments" in found["command"]) is grown
    assert gaps[1] < gaps[0] / 2
    keys = [control["key"] for control in plan(EIGHT)["controls"]]
    assert "expandable_segments" in keys


def test_one_answer_has_all_that_a_page_shows() -> None:
    """P34: no button: a turn of a dial asks once, and the margin is in the answer."""
    found = plan(EIGHT)
    stage = found["plan"]["memory"]["stages"][0]
    assert 0 < stage["margin_bytes"] < stage["total_bytes"]
    assert found["figures"]["memory.margin"]["value"] > 0
    assert found["controls"]
    assert found["memory_wall"]["state_bytes"]
    assert found["verdict"] in found["headline"]


@SETTINGS
@given(WILD, st.sampled_from([name for name in QUICK if name not in ("catalogue", "presets", "link", "compare")]))
def test_no_state_fails(state: dict[str, Any], name: str) -> None:
    """An answer or a refusal, and both as JSON."""
    more = {"export": {"target": "torchtitan"}, "explain": {"figure": "step_s"}}.get(name, {})
    more = {"figure": "step_s", "value": 1.5} if name == "measured" else more
    sound, text = reply(name, json.dumps({"state": state, **more}))
    found = json.loads(text)
    assert sound or found["problems"]


@SETTINGS
@given(STATES)
def test_the_same_state_the_same_answer(state: dict[str, Any]) -> None:
    """Caches change nothing, and a state that came back asks the same."""
    found = plan(state)
    assert plan(state) == found
    if not found["problems"]:
        assert answer("plan", {"state": found["state"]})["plan"] == found["plan"]


def test_questions_need_nothing_but_the_standard_library() -> None:
    """They answer in a browser too, where these are not; tomli_w, a file of Python, comes with them."""
    blocked = ("torch", "numpy", "pydantic", "rich", "fastapi", "starlette", "uvicorn", "cyclopts")
    program = f"""
import sys
before = {{*sys.modules}}
for name in {blocked!r}:
    sys.modules[name] = None
from trigrid.web.questions import answer
found = answer("plan", {{"state": {EIGHT!r}}})
for name in ("timeline", "job", "trace", "cluster", "sensitivity"):
    answer(name, {{"state": found["state"]}})
answer("presets", {{}})
loaded = {{name.partition(".")[0] for name in {{*sys.modules}} - before if sys.modules[name] is not None}}
print(found["dp"], *sorted(loaded - sys.stdlib_module_names))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "tomli_w", "trigrid"]
