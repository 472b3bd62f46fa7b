"""Blocks as graphs of torch.compile: the same numbers, one graph for layers alike, nothing kept that should not be."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiled import in_graphs, quickly, watch, without_sums_over_tp
from helpers.jobs import frozen, named, small_job
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from trigrid.check.parity import batch, judge, reference, run_rank, share
from trigrid.check.pool import Pool
from trigrid.check.prove import prove
from trigrid.check.roles import roles
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.engine.units import Microbatch
from trigrid.errors import Refused
from trigrid.grid import grid_of
from trigrid.models import compiled
from trigrid.models.build import build_engine
from trigrid.plan.plan import make_plan
from trigrid.plan.scheduled import check_schedule
from trigrid.plan.traffic import step_traffic
from trigrid.schedule import make_schedule
from trigrid.schedule.files import write_schedule
from trigrid.spec.job import Data, Job
from trigrid.train.machine import check_compiler

CPU = torch.device("cpu")
GPT = {"block": "gpt", "kv_heads": 8, "tied": True}
SP: dict[str, Any] = {"sequence_parallel": True}
MATRIX: list[tuple[str, dict[str, Any], dict[str, Any], tuple[float, float], bool]] = [
    # layout, its fields, the model, dropout, documents
    ("tp2", {"zero": 0}, {}, (0.2, 0.0), False),
    ("tp2", {**SP, "regather": True, "recompute": "selective"}, {"qk_norm": True, "qkv_bias": True}, (0.0, 0.0), True),
    ("tp2", {**SP, "zero": 3, "recompute": "full"}, GPT, (0.0, 0.0), False),
    ("dp2", {"zero": 2, "recompute": "selective"}, GPT, (0.2, 0.3), True),
    ("pp2dp2", {"zero": 3, "recompute": ("full", "none")}, {"tied": True}, (0.2, 0.0), False),
    ("pp2", {"zero": 1, "schedule": "interleaved", "virtual_stages": 3}, {}, (0.0, 0.0), False),
]


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """On this process; workers have `quickly` of their own."""
    if "default_backend" in request.fixturenames:
        yield
    else:
        with quickly():
            yield


@pytest.fixture
def default_backend() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")


def with_dropout(job: Job, hidden: float, attention: float) -> Job:
    return replace(job, run=replace(job.run, dropout=hidden, attention_dropout=attention))


def engine_of(job: Job) -> Engine:
    return build_engine(job, Comm(grid_of(job), 0), CPU)


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(("name", "fields", "model", "dropout", "documents"), MATRIX, ids=str)
def test_law_1(
    pool: Pool, name: str, fields: dict[str, Any], model: dict[str, Any], dropout: tuple[float, float], documents: bool
) -> None:
    job = with_dropout(small_job(named(name, **fields), **model), *dropout)
    job = replace(job, data=Data(document_attention=documents))
    runs = pool.run(run_rank, job.parallel.world, in_graphs(job), quickly)
    found = judge(job, runs, reference(job, pool))
    assert found.passed, found


def test_a_collective_that_is_missing_in_a_graph_is_caught(pool: Pool) -> None:
    job = small_job(named("tp2"))
    found = judge(job, pool.run(run_rank, 2, in_graphs(job), without_sums_over_tp), reference(job, pool))
    assert not found.passed


@pytest.mark.usefixtures("default_backend")
def test_kernels_of_the_default_backend(pool: Pool) -> None:
    job = small_job(named("tp1", recompute="selective"))
    with torch._inductor.config.patch(compile_threads=1):
        run = run_rank(0, in_graphs(job))
    found = judge(job, [run], reference(job, pool))
    assert found.passed, found


# ---------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize(
    ("job", "training"),
    [(small_job(named("tp1")), 1), (frozen(small_job(named("tp1", zero=3))), 3)],
    ids=["all", "frozen"],
)
def test_layers_alike_share_a_graph(job: Job, training: int) -> None:
    """One to train with for each choice of frozen weights, and one without gradients; no step makes another."""
    engine = engine_of(in_graphs(with_dropout(job, 0.1, 0.0)))
    counters.clear()
    for step in range(2):
        tokens, labels = (share(rows, job, 0) for rows in batch(job, step))
        engine.step(tokens, labels, 1e-3, consumed=0)
        assert counters["stats"]["unique_graphs"] == training
    for _ in range(2):
        engine.evaluate(tokens, labels)
        assert counters["stats"]["unique_graphs"] == training + 1
    assert not counters["graph_break"]


def test_more_engines_than_torch_allows_graphs_of_one_function() -> None:
    """Each has graphs of its own, so a program that makes many does not run into a limit."""
    job = in_graphs(small_job(named("tp1"), layers=1))
    tokens, labels = (share(rows, job, 0) for rows in batch(job, 0))
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            engine_of(job).accumulate(tokens, labels)


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("model", [{}, GPT], ids=["llama", "gpt"])
def test_a_block_keeps_what_it_keeps_uncompiled(model: dict[str, Any]) -> None:
    """With selective recomputation to the byte; without any, no more."""
    kept = {
        (recompute, compile): kept_bytes(job if not compile else in_graphs(job))
        for recompute in ("none", "selective")
        for job in [small_job(named("tp1", recompute=recompute), **model)]
        for compile in (False, True)
    }
    assert kept["selective", True] == kept["selective", False] < 0.85 * kept["none", False]
    assert kept["selective", True] < kept["none", True] <= kept["none", False]


def kept_bytes(job: Job) -> int:
    """Of storages that autograd saves of a block, weights apart."""
    engine = engine_of(job)
    unit = engine.stages[0].units[1]
    assert unit.name == "layers.0"
    tokens_SB = torch.zeros(16, 2, dtype=torch.int64)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not any(bucket.owns(tensor) for bucket in unit.buckets):
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        unit.forward(
            torch.randn(16, 2, 32, dtype=torch.float64), 0, Microbatch(tokens_SB, tokens_SB, torch.ones(())), True
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_no_gathered_weight_outlives_its_use_and_the_traffic_is_the_plans(pool: Pool) -> None:
    layout = named("tp2dp2", zero=3, regather=True, recompute="selective", **SP)
    job = small_job(layout, qk_norm=True)
    for rank, seen in enumerate(pool.run(watch, 4, in_graphs(job))):
        assert not seen.survivors, (rank, seen.survivors)
        assert seen.traffic == {key: tuple(count) for key, count in step_traffic(job, rank).items()}, rank


# ---------------------------------------------------------------------------------------------- refused


def test_a_file_that_splits_backwards_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "zbv.csv"
    layout = named("pp2", schedule="zbv", virtual_stages=2, schedule_file=str(path))
    job = small_job(layout)
    write_schedule(make_schedule("zbv", 2, job.batch.microbatches(layout)), path)
    check_schedule(job)
    with pytest.raises(Refused, match=r"^parallel\.schedule_file = .*: splits backwards, and a graph of run\.compile"):
        check_schedule(in_graphs(job))


def test_a_machine_without_a_compiler_is_refused() -> None:
    job = in_graphs(small_job(named("tp1")))
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        check_compiler(small_job(named("tp1")), CPU)
        with pytest.raises(Refused, match=r"^run\.compile = true: there is no C\+\+ compiler .* nearest legal: false"):
            check_compiler(job, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is there")
def test_a_gpu_without_triton_is_refused() -> None:
    with pytest.raises(Refused, match=r"^run\.compile = true: the package triton, .* nearest legal: false"):
        check_compiler(in_graphs(small_job(named("tp1"))), torch.device("cuda"))


def test_a_dry_run_and_a_plan_are_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    job = in_graphs(small_job(named("tp1"), precision="fp32"))
    told = "time and memory are those of the program before it is compiled (run.compile)"
    assert told in make_plan(job).assumptions
    monkeypatch.setattr(compiled, "_compiled", lambda *_: pytest.fail("compiled"))
    (proof,) = prove(job, roles(job))
    assert proof.holds
