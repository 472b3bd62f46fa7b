"""Products of fp32 matrices: how exactly they are computed is set for a job alone, and measured before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.in_process import quick, train
from helpers.jobs import named, small_job
from helpers.runs import write_job
from torch import Tensor

from trigrid.engine import matmul
from trigrid.engine.comm import Comm
from trigrid.engine.matmul import BACKENDS, ProductError, matmul_precision, product_error
from trigrid.engine.pipeline import Pipeline
from trigrid.errors import Refused
from trigrid.grid import grid_of
from trigrid.models.build import build_engine
from trigrid.train.machine import judged

CPU = torch.device("cpu")


def settings() -> list[str]:
    return [backend.fp32_precision for backend in BACKENDS]


def as_on_amx(x: Tensor, w: Tensor) -> Tensor:
    """The product of a CPU that takes "medium" by its word."""
    if torch.get_float32_matmul_precision() == "medium":
        return F.linear(x.bfloat16(), w.bfloat16()).float()
    return F.linear(x, w)


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "F", SimpleNamespace(linear=as_on_amx))


# ---------------------------------------------------------------------------------------------- the setting


def test_the_setting_holds_within_and_what_was_set_before_is_again() -> None:
    def fail() -> None:
        with matmul_precision("medium"):
            assert settings() == ["tf32", "bf16"]
            assert torch.get_float32_matmul_precision() == "medium"
            raise KeyError

    before = settings()
    with pytest.raises(KeyError):
        fail()
    assert settings() == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_backends_that_a_program_has_set_apart_are_left_so() -> None:
    backend = BACKENDS[1]
    backend.fp32_precision = "bf16"
    try:
        with matmul_precision("highest"):
            assert settings() == ["ieee", "ieee"]
        assert settings() == ["none", "bf16"]
    finally:
        backend.fp32_precision = "none"


def test_an_engine_computes_by_its_job_and_leaves_nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run = [], Pipeline.run

    def noting(*arguments: Any) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return run(*arguments)

    monkeypatch.setattr(Pipeline, "run", noting)
    before = settings()
    for name in ("medium", "highest"):
        job = small_job(named("tp1"), precision="fp32")
        job = replace(job, run=replace(job.run, matmul_precision=name))
        engine = build_engine(job, Comm(grid_of(job), 0), CPU)
        rows = torch.zeros(1, 2, 16, dtype=torch.int64)
        engine.step(rows, rows, 1e-3)
        engine.evaluate(rows, rows)
        assert settings() == before
    assert seen == ["medium"] * 2 + ["highest"] * 2


# ---------------------------------------------------------------------------------------------- its error


def test_the_error_of_highest_is_that_of_fp32() -> None:
    found = product_error("highest", [(48, 32), (64, 300)], 16, CPU)
    assert 1e-8 < found.error == found.highest < 1e-6


@pytest.mark.usefixtures("amx")
def test_a_format_of_fewer_bits_is_seen() -> None:
    found = product_error("medium", [(48, 32)], 16, CPU)
    assert found.error == pytest.approx(2.4e-3, rel=0.3)
    assert found.times > 1000
    assert product_error("high", [(48, 32)], 16, CPU).times == 1.0
    # Whichever product of a step it is.
    assert sorted(found.shape) == [16, 32, 48]


def test_a_cpu_must_be_exact_and_a_gpu_says_how_exact_it_is() -> None:
    errors = [ProductError(2e-7, 2e-7, (8, 4, 2)), ProductError(3e-4, 2e-7, (16, 8, 4))]
    told = "a product of 16 × 8 × 4 on rank 1 is 3.0e-04 off fp64, and 2.0e-07 with highest"
    assert judged("high", errors, torch.device("cuda")) == f"run.matmul_precision = high: {told}"
    with pytest.raises(Refused) as refused:
        judged("high", errors, CPU)
    reason = f"{told}: this CPU multiplies in a format of fewer bits"
    assert str(refused.value) == f"run.matmul_precision = high: {reason}; nearest legal: highest"


# ---------------------------------------------------------------------------------------------- in a run


def test_a_run_refuses_what_its_cpu_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path)
    flags = quick(1, every=0, **{"run.matmul_precision": "medium"})
    # Whatever this machine does with the word.
    monkeypatch.setattr(matmul, "F", SimpleNamespace(linear=lambda x, w: (x.double() @ w.double().t()).float()))
    assert train(job, *flags) is not None
    monkeypatch.setattr(matmul, "F", SimpleNamespace(linear=as_on_amx))
    with pytest.raises(Refused, match=r"run\.matmul_precision = medium: a product of .* on rank 0 is 2\.\de-03 off"):
        train(job, *flags)
    # In another precision there are no products of fp32 to ask after.
    assert train(job, *flags, "--precision", "bf16") is not None
    assert torch.get_float32_matmul_precision() == "highest"
