"""`trigrid simulate` and `trigrid plan --balance`, as a user meets them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import trigrid
from trigrid.cli import app
from trigrid.errors import Refused
from trigrid.job import load_job
from trigrid.schedule import Action, Kind, make_schedule, order_of, read_schedule, validate, write_schedule

JOB = "examples/llama3-405b.toml"
SMALL = f"{JOB} --model.name llama3-8b --pp 4 --dp 4 --global-batch 32"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])


def run(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard output of `trigrid LINE`, which succeeds."""
    app(line.split(), exit_on_error=False, print_error=False, result_action="return_value")
    return capsys.readouterr().out


def simulated(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(f"simulate {line} --json", capsys))
    return found


def refusal(line: str) -> str:
    with pytest.raises(Refused) as refused:
        app(line.split(), exit_on_error=False, print_error=False)
    return str(refused.value)


def test_it_prints_the_step_a_picture_and_what_each_rank_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    lines = run(f"simulate {SMALL}", capsys).splitlines()
    assert lines[0].startswith("llama3-8b: schedule 1f1b, 4 ranks, 4 stages, 8 microbatches, with the planner's")
    text = "\n".join(lines)
    for word in ("bubble_ratio", "idle_share", "P2P exposed", "tp exposed", "in flight GiB", "rank 3 |"):
        assert word in text
    assert max(map(len, lines)) <= 100


def test_json_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(f"{SMALL} --slow-rank 17:1.3 --fail 3:0.1 --jitter 0.02 --repetitions 20", capsys)
    assert found["schema"] == "trigrid.simulate/1"
    assert (found["schedule"], found["microbatches"], found["placement"]) == ("1f1b", 8, [0, 1, 2, 3])
    assert found["step_s"] == pytest.approx(found["pipeline_s"] + sum(found["beyond_s"].values()))
    assert len(found["ranks"]) == 4
    assert {"busy_s", "bubble_ratio", "idle_share", "p2p_exposed_s", "peak_in_flight_bytes"} <= found["ranks"][0].keys()
    assert found["ranks"][0]["in_flight"][-1]["bytes"] == 0
    (straggler,) = found["stragglers"]
    assert straggler["at"] == {"dp": 0, "pp": 2, "cp": 0, "tp": 1}
    assert straggler["pipeline_s"] > 0
    assert found["together_s"] == pytest.approx(found["step_s"] + straggler["pipeline_s"], rel=1e-6)
    assert len(found["failure"]["pipeline_ranks"]) == 4
    assert found["failures"] == [found["failure"]]
    spread = found["repetitions"]
    assert found["step_s"] < spread["p50_s"] <= spread["p95_s"] <= spread["max_s"]
    assert (spread["played"], spread["drawn"]) == (80, False)


def test_schedules_are_saved_and_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "auto.json"
    made = simulated(f"{SMALL} --schedule auto --save-schedule {file}", capsys)
    schedule = read_schedule(file)
    validate(schedule)
    again = simulated(f"{SMALL} --schedule-file {file}", capsys)
    assert (made["schedule"], again["schedule"]) == ("auto", "auto")
    assert again["pipeline_s"] == made["pipeline_s"]
    named = simulated(SMALL, capsys)
    assert made["pipeline_s"] < named["pipeline_s"]
    assert made["auto"]["bound_s"] <= made["pipeline_s"] <= made["auto"]["named_s"]


def test_a_model_is_searched_first(capsys: pytest.CaptureFixture[str]) -> None:
    line = "llama3-8b --gpus 16 --gpu h100 --tp 4 --pp 4 --zero 1 --micro-batch 1 --recompute none --global-batch 64"
    found = simulated(f"{line} --seq 4096", capsys)
    assert len(found["ranks"]) == 4
    assert simulated(f"{line} --seq 4096 --schedule auto", capsys)["schedule"] == "auto"


def test_files_are_written_and_told_on_standard_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = f"simulate {SMALL} --trace {tmp_path / 't.json'} --svg {tmp_path / 's.svg'}".split()
    app(words, exit_on_error=False, print_error=False, result_action="return_value")
    told = capsys.readouterr().err
    assert "t.json is written; open it at ui.perfetto.dev" in told
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "s.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--slow-rank 128:2", "slow-rank = 128:2: RANK:FACTOR, a rank from 0 to 127 and a factor from 1 to 1000, is"),
        ("--slow-rank 3:0.5", "slow-rank = 3:0.5: RANK:FACTOR"),
        ("--slow-rank 3", "slow-rank = 3: RANK:FACTOR"),
        ("--slow-link 3:2", "slow-link = 3:2: FROM-TO:FACTOR with pipeline ranks from 0 to 3"),
        ("--slow-link 0-2:2", "slow-link = 0-2: schedule 1f1b sends nothing there; nearest legal: 0-1"),
        ("--fail 3", "fail = 3: RANK:SECONDS"),
        ("--fail 3:-1", "fail = 3:-1: RANK:SECONDS"),
        ("--fail 3:0.1 --fail 3:0.2", "fail = 3:0.2: rank 3 stops at 0.1 s already"),
        ("--fail 3:1e9", "fail = 3:1e+09: is after the pipeline's end: it takes"),
        ("--jitter nan", "jitter = nan: must be from 0 to 1"),
        ("--trace t.json --svg nowhere/t.svg", "svg = nowhere/t.svg: its folder is not there"),
        ("--jitter 2", "jitter = 2.0: must be from 0 to 1; nearest legal: 1"),
        ("--repetitions 5", "repetitions = 5: without --jitter all of them are the same; nearest legal: 1"),
        ("--jitter 0.1 --repetitions 0", "repetitions = 0: must be from 1 to 100,000; nearest legal: 1"),
        ("--durations none.csv", "durations = none.csv: cannot be read"),
        ("--schedule-file none.csv", "schedule-file = none.csv: cannot be read: No such file or directory"),
        ("--trace none/t.json", "trace = none/t.json: its folder is not there"),
        ("--save-schedule none/t.json", "save-schedule = none/t.json: its folder is not there"),
        ("--save-schedule own.txt", "save-schedule = own.txt: not a kind of file that schedules are kept in"),
        ("--schedule fancy", "parallel.schedule"),
    ],
)
def test_mistakes_are_told_with_the_way_out(flags: str, message: str) -> None:
    assert message in refusal(f"simulate {SMALL} {flags}")


def test_a_schedule_that_deadlocks_is_refused(tmp_path: Path) -> None:
    """R49, R50: rendezvous channels, whatever a transport with buffers would let pass."""
    schedule = make_schedule("1f1b", 4, 8)
    last = list(schedule.ranks[3])
    last[0], last[2] = last[2], last[0]
    last[1], last[3] = last[3], last[1]
    first = sorted(schedule.ranks[0], key=lambda action: (action.microbatch, action.kind is not Kind.FORWARD))
    assert first[:2] == [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)]
    broken = type(schedule)("own", 8, schedule.placement, (tuple(first), *schedule.ranks[1:3], tuple(last)))
    write_schedule(broken, tmp_path / "own.csv")
    assert "cannot run: schedule own: deadlock" in refusal(f"simulate {SMALL} --schedule-file {tmp_path / 'own.csv'}")


def test_a_balanced_plan_is_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(f"plan {SMALL} --balance --save {tmp_path / 'balanced.toml'}", capsys)
    assert "balance: stage_layers [8, 9, " in text
    saved = load_job(tmp_path / "balanced.toml", env={})
    assert sum(saved.parallel.stage_layers) == 32
    found = json.loads(run(f"plan {SMALL} --balance --json", capsys))
    assert found["balance"]["stage_layers"] == list(saved.parallel.stage_layers)
    assert found["balance"]["slowest_s"] < found["balance"]["before_s"]
    before, after = (simulated(f"{SMALL} {flag}", capsys)["step_s"] for flag in ("", "--balance"))
    assert after < before


def test_auto_and_files_are_planned_but_their_neighbours_are_not_priced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    auto, named = (json.loads(run(f"plan {SMALL} --schedule {n} --json", capsys)) for n in ("auto", "1f1b"))
    assert auto["layout"]["schedule"] == "auto"
    assert auto["time"]["step_s"]["best"] < named["time"]["step_s"]["best"]
    assert sum(auto["time"]["parts_s"].values()) == pytest.approx(auto["time"]["step_s"]["best"])
    assert "parallel.schedule = auto: neighbours of a layout" in refusal(f"plan {SMALL} --schedule auto --sensitivity")
    write_schedule(make_schedule("zb-h1", 4, 8), tmp_path / "own.csv")
    own = f"--parallel.schedule_file {tmp_path / 'own.csv'}"
    for flags in (own, f"{own} --schedule auto"):
        filed = json.loads(run(f"plan {SMALL} {flags} --json", capsys))
        assert auto["time"]["step_s"]["best"] < filed["time"]["step_s"]["best"] < named["time"]["step_s"]["best"]
    assert "neighbours of a layout" in refusal(f"plan {SMALL} {own} --recompute-table")
    with pytest.raises(Refused, match="schedule = auto: is made for one layout"):
        trigrid.search("llama3-8b", gpus=8, global_batch=8, schedule="auto")


# What it may cost: CPU seconds, with room for a machine that does other things as well.


def test_ten_thousand_gpus_with_jitter_take_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """P21: 16,384 GPUs, 1,000 repetitions: some 3 CPU-seconds."""
    begin = time.process_time()
    found = simulated(f"{JOB} --jitter 0.02 --repetitions 1000 --slow-rank 17:1.3 --slow-link 3-4:10", capsys)
    assert time.process_time() - begin < 15
    assert (found["repetitions"]["played"], found["repetitions"]["drawn"]) == (128_000, False)


def test_a_large_schedule_is_replayed_at_once() -> None:
    """16 ranks of 4 stages, 128 microbatches, 16,384 actions: some 0.1 CPU-seconds from nothing to a timeline."""
    begin = time.process_time()
    order = order_of(make_schedule("interleaved", 16, 128, 4))
    timeline = order.play([1.0] * len(order.ranks), [0.1] * len(order.ranks))
    assert time.process_time() - begin < 1
    assert len(timeline.ends_s) == 16_384
