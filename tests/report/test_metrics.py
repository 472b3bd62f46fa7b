"""Rates from seconds, and steps as lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.reports import FACTS

from trigrid.report.metrics import StepRecord, StepTable, Summary, describe, rates

RECORD = StepRecord(
    **rates(FACTS, 0.5),
    step=20,
    loss=5.12341,
    gradient_norm=12.3456,
    learning_rate=3e-4,
    tokens=20 * 2048,
    step_s=0.5,
    data_wait_s=0.01,
    data_wait_share=0.02,
    peak_memory_bytes=3 * 2**29,
    eta_s=187,
)


def test_rates() -> None:
    """2,048 tokens of 1 and 0.8 MFLOP in half a second, on four ranks of 2 GFLOP/s each."""
    assert rates(FACTS, 0.5) == {
        "tokens_per_s": 4096,
        "tokens_per_s_per_rank": 1024,
        "flops_per_s_per_rank_full": 1024e6,
        "flops_per_s_per_rank_causal": pytest.approx(819.2e6),
        "mfu_full": 0.512,
        "mfu_causal": pytest.approx(0.4096),
    }


def test_a_step_is_a_line() -> None:
    told = StepTable(60)
    assert told.header.split() == [
        *("step", "loss", "norm", "lr", "tok/s", "/rank", "TFLOP/s/rank", "MFU", "causal"),
        *("peak", "GiB", "wait", "ETA"),
    ]
    assert told.row(RECORD).split() == [
        *("20/60", "5.1234", "12.346", "3.00e-04", "4,096", "1,024", "0.001", "51.2%", "41.0%"),
        *("1.50", "2%", "3m07s"),
    ]
    assert told.validation(20, 4.5) == "20/60    4.5000  validation loss"


@pytest.mark.parametrize("steps", [4, 60, 99_999])
def test_lines_of_a_run_are_of_one_width(steps: int) -> None:
    told = StepTable(steps)
    fast = replace(RECORD, step=steps, tokens_per_s=12_345_678.9, flops_per_s_per_rank_full=989e12, mfu_full=1.03)
    for record in (RECORD, fast, replace(RECORD, step=1, eta_s=1_047_600, loss=123.4)):
        if record.step <= steps:
            assert len(told.row(record)) == len(told.header)
    assert len(told.header) <= 109 + max(0, 2 * len(str(steps)) + 1 - 5)


def test_describe() -> None:
    summary = Summary(
        **rates(FACTS, 0.5),
        first_loss=8.5,
        last_loss=2.25,
        validation_loss=2.5,
        steps=60,
        tokens=122_880,
        seconds=61,
        data_wait_share=0.0123,
        run_dir="runs/a",
    )
    assert describe(summary).splitlines() == [
        "60 steps, 122,880 tokens in 1m01s",
        "median step: 4,096 tok/s, 1,024 per rank; MFU 51.2% with full attention, 41.0% causal; data wait 1.2%",
        "training loss 8.5000 → 2.2500, validation loss 2.5000",
        "job, metrics, loss curve and logs: runs/a",
    ]
    assert "validation" not in describe(replace(summary, validation_loss=None))
