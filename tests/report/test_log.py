"""A run as it is told: what is written, what is said, what is drawn."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.reports import FACTS, told_to

from trigrid.report import log as module
from trigrid.report.console import Console
from trigrid.report.log import Log
from trigrid.report.metrics import Interval, Slowest
from trigrid.report.trackers import KINDS

HALF_A_SECOND = Interval(steps=1, seconds=0.5, data_wait_s=0.01, peak_memory_bytes=2**30)


def steps(log: Log, count: int) -> None:
    """`count` more recorded steps of half a second, whose losses fall from 9 by one a step."""
    for _ in range(count):
        log.advance(9 - len(log._losses), 0.5, 2048 * (len(log._losses) + 1))
        log.step(1.5, 1e-3, HALF_A_SECOND)


def written(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = replace(FACTS, steps=6)
    with Log(told_to(), facts, tmp_path, Console()) as log:
        steps(log, 3)
        log.validation(6.5)
        steps(log, 3)
        summary = log.end()
    start, *middle, end = written(tmp_path)
    assert [entry["kind"] for entry in (start, *middle, end)] == [
        "start",
        *["step"] * 3,
        "validation",
        *["step"] * 3,
        "end",
    ]
    assert {key: start[key] for key in ("world", "parameters", "data", "matmul_flops_per_s")} == {
        "world": 4,
        "parameters": 1000,
        "data": "d0",
        "matmul_flops_per_s": 8e9,
    }
    second = {key: value for key, value in middle[1].items() if key != "time_s"}
    assert second == {
        "kind": "step",
        "step": 2,
        "loss": 8,
        "gradient_norm": 1.5,
        "learning_rate": 1e-3,
        "tokens": 4096,
        "tokens_per_s": 4096,
        "tokens_per_s_per_rank": 1024,
        "flops_per_s_per_rank_full": 1024e6,
        "flops_per_s_per_rank_causal": pytest.approx(819.2e6),
        "mfu_full": 0.512,
        "mfu_causal": pytest.approx(0.4096),
        "step_s": 0.5,
        "data_wait_s": 0.01,
        "data_wait_share": 0.02,
        "peak_memory_bytes": 2**30,
        "eta_s": 2,
        "slowest_rank": None,
        "slowest_busy_s": None,
        "usual_busy_s": None,
    }
    assert middle[3]["step"] == 3
    assert middle[3]["loss"] == 6.5
    assert (summary.first_loss, summary.last_loss, summary.validation_loss) == (9, 4, 6.5)
    assert (summary.tokens, summary.tokens_per_s, summary.data_wait_share) == (6 * 2048, 4096, 0.02)
    assert end["run_dir"] == str(tmp_path)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "4 × cpu: matrix products at 8 GFLOP/s in all (fp32), the measure of MFU"
    assert lines[1].split()[:3] == ["step", "loss", "norm"]
    told = [line.split()[:2] for line in lines[2:9]]
    assert told == [["1/6", "9.0000"], ["2/6", "8.0000"], ["3/6", "7.0000"], ["3/6", "6.5000"]] + [
        [f"{step}/6", f"{10 - step}.0000"] for step in (4, 5, 6)
    ]
    assert err.count("TFLOP/s/rank") == 1
    assert "training loss and validation loss (●)" in err
    assert (tmp_path / "loss.svg").exists()


def test_an_interval_of_several_steps_is_told_as_their_mean(tmp_path: Path) -> None:
    with Log(told_to(), FACTS, tmp_path, Console(quiet=True)) as log:
        for loss in (9, 8, 7, 6):
            log.advance(loss, 0.5, 2048 * (10 - loss))
        log.step(1.5, 1e-3, Interval(steps=4, seconds=2.0, data_wait_s=1.0, peak_memory_bytes=1))
    (_, step) = written(tmp_path)
    assert (step["step"], step["loss"], step["tokens"]) == (4, 6, 4 * 2048)
    assert (step["step_s"], step["data_wait_s"], step["data_wait_share"]) == (0.5, 0.25, 0.5)
    assert step["tokens_per_s"] == 4096


def test_a_rank_that_stays_slow_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R93: not at the first slow step, which may be chance, nor again and again."""
    slow = replace(HALF_A_SECOND, steps=2, seconds=2.0, slowest=Slowest(rank=3, busy_s=1.0, usual_s=0.5))
    with Log(told_to(), FACTS, tmp_path, Console(quiet=True)) as log:
        for interval in (slow, slow, HALF_A_SECOND, slow, slow, slow, slow):
            log.advance(9.0, 0.5, 2048)
            log.step(1.5, 1e-3, interval)
    assert capsys.readouterr().err.splitlines() == [
        "warning: rank 3 is slow: busy for 0.5 s of a step, other ranks of its stage for 0.25 s; they wait for it"
    ]
    assert written(tmp_path)[1]["slowest_rank"] == 3
    assert (written(tmp_path)[1]["slowest_busy_s"], written(tmp_path)[1]["usual_busy_s"]) == (0.5, 0.25)


def test_a_tracker_is_not_told_what_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TensorBoard takes no None."""
    with Log(told_to("tensorboard"), FACTS, tmp_path, Console(quiet=True)) as log:
        steps(log, 1)
    assert written(tmp_path)[1]["slowest_rank"] is None
    assert "tensorboard" not in capsys.readouterr().err


def test_quiet_says_nothing_and_writes_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(told_to(), FACTS, tmp_path, Console(quiet=True)) as log:
        steps(log, 6)
        log.validating(1, 2)
        log.validation(6.5)
        log.end()
    assert capsys.readouterr() == ("", "")
    assert [entry["kind"] for entry in written(tmp_path)] == ["start", *["step"] * 6, "validation", "end"]
    assert (tmp_path / "loss.svg").exists()


def test_few_steps_are_no_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(told_to(), FACTS, tmp_path, Console()) as log:
        steps(log, 4)
        log.end()
    assert not (tmp_path / "loss.svg").exists()
    assert "training loss" not in capsys.readouterr().err


def test_a_curve_that_cannot_be_drawn_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotext", None)
    with Log(told_to(), FACTS, tmp_path, Console()) as log:
        steps(log, 5)
        summary = log.end()
    assert summary.steps == 5
    assert (
        "warning: the loss curve is not drawn: ModuleNotFoundError: import of plotext halted" in capsys.readouterr().err
    )


def test_an_mfu_above_100_percent_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P18: with the whole attention matrix counted, or a rate measured too low, MFU can pass what is possible."""
    slow = replace(FACTS, matmul_flops_per_s=3.6e9)
    with Log(told_to(), slow, tmp_path, Console(quiet=True)) as log:
        steps(log, 3)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: MFU is above 100% (113.8% with full attention, 91.0% causal): ")


def test_the_header_comes_again_on_a_terminal_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, on_terminal, times in (("file", False, 1), ("terminal", True, 3)):
        (tmp_path / name).mkdir()
        console = Console()
        log = Log(told_to(), FACTS, tmp_path / name, console)
        console.on_terminal = on_terminal
        with log:
            steps(log, 2 * module.ROWS_PER_HEADER + 1)
        assert capsys.readouterr().err.count("TFLOP/s/rank") == times


def test_trackers_hear_of_the_job_the_steps_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, Any] = {"steps": []}

    class Tracker:
        def __init__(self, start: Any) -> None:
            heard["facts"] = start.facts

        def log(self, step: int, values: dict[str, float]) -> None:
            heard["steps"].append((step, values))

        def close(self, failed: bool) -> None:
            heard["failed"] = failed

    monkeypatch.setitem(KINDS, "wandb", Tracker)
    with suppress(RuntimeError), Log(told_to("wandb"), FACTS, tmp_path, Console(quiet=True)) as log:
        steps(log, 1)
        log.validation(6.5)
        raise RuntimeError
    assert heard["facts"]["model.hidden"] == 32
    assert heard["facts"]["run.trackers"] == "('wandb',)"
    assert heard["facts"]["world"] == 4
    (first, values), validation = heard["steps"]
    assert (first, values["train/loss"], values["train/mfu_full"]) == (1, 9, 0.512)
    assert validation == (1, {"validation/loss": 6.5})
    assert heard["failed"]
