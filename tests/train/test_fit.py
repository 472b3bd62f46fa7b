"""What `train` says and refuses before it starts on GPUs. There are none here: torch is told that there are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.jobs import named, small_job

from trigrid.errors import Refused
from trigrid.report.console import Console
from trigrid.spec.models import load_model
from trigrid.train.fit import check_plan


@pytest.fixture
def gpu_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * 2**30))


LARGE = replace(small_job(named("dp8", zero=1), precision="bf16"), model=load_model("llama3-70b"))


@pytest.mark.usefixtures("gpu_bytes")
def test_what_cannot_fit_is_refused_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    """P25."""
    with pytest.raises(Refused, match=r"--ignore-plan = \(not given\): stage 0 needs about \d+\.\d GiB, .* has 80\.0"):
        check_plan(LARGE, Console(), ignore=False)
    assert "plan: DOES NOT FIT" in capsys.readouterr().err
    check_plan(LARGE, Console(), ignore=True)
    assert "warning: stage 0 needs about" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu_bytes")
def test_what_fits_is_told_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    check_plan(small_job(named("dp8"), precision="bf16"), Console(), ignore=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("plan: FITS, SAFE")


def test_a_job_on_cpus_has_no_plan_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    check_plan(LARGE, Console(), ignore=False)
    assert capsys.readouterr().err == ""
