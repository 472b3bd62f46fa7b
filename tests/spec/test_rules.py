"""Every rule, with the message a user reads."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from helpers.refused import REFUSED, SCALING, SOUND, changed

from trigrid.blueprint import decoder
from trigrid.errors import Problem
from trigrid.spec import rules, run_rules
from trigrid.spec.job import Job
from trigrid.spec.model import Experts, LatentAttention, RopeScaling
from trigrid.spec.rules import RANGES, Range, check, check_trainable, warnings

ALLOWED: list[dict[str, Any]] = [
    {},
    {"parallel.tp": 12, "model.ffn": 480, "batch.sequence": 120},  # KV heads copied: tp is a multiple of them
    {"parallel.tp": 4, "batch.sequence": 126, "parallel.sequence_parallel": False},
    {"parallel.pp": 6},
    {"parallel.pp": 4, "parallel.stage_layers": (0, 2, 2, 0)},
    {"parallel.recompute": ("selective", "full")},
    {"run.dropout": 0.1, "run.attention_dropout": 0.99},
    {"parallel.order": ("pp", "dp", "tp", "cp")},
    {"parallel.dp_replicate": 2},
    {"parallel.zero": 3, "parallel.gather": "per_use"},
    {"parallel.zero": 3, "parallel.gather": "per_step", "parallel.reduce": "per_step"},
    {"parallel.zero": 1, "parallel.reduce": "per_microbatch"},
    {"model.block": "gpt", "model.kv_heads": 12, "model.head_dim": 15},
    {"model.rope_scaling": SCALING},
    {"optimizer.warmup_steps": 9},
    {"optimizer.beta1": 0.0, "optimizer.clip_norm": 0.0, "data.validation_fraction": 0.5},
    {"data.validation_fraction": 0.0},
    {"optimizer.clip_norm": 0},  # written by Python code, where a whole number does for a float
    {"run.seed": 2**63 - 1},
    {"data.cache": ""},
    {"data.corpus": ("stdlib", "notes"), "data.weights": (1, 0.25)},
    {"data.workers": 0},
    {"run.trackers": ()},
    {"run.compile": True, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2},
    {
        "run.compile": True,
        "parallel.schedule": "zbv",
        "parallel.virtual_stages": 2,
        "parallel.schedule_file": "whole.csv",
    },
    {"run.trackers": ("wandb", "prometheus"), "run.prometheus_port": 65535},
]


@pytest.mark.parametrize(("changes", "messages"), REFUSED, ids=lambda v: str(v)[:60])
def test_refused_with_reason_and_way_out(changes: dict[str, Any], messages: list[str]) -> None:
    assert [str(p) for p in check(changed(changes))] == messages


@pytest.mark.parametrize("changes", ALLOWED, ids=str)
def test_allowed(changes: dict[str, Any]) -> None:
    assert check(changed(changes)) == []


@pytest.mark.parametrize(("changes", "messages"), REFUSED, ids=lambda v: str(v)[:60])
def test_a_legal_value_is_legal(changes: dict[str, Any], messages: list[str]) -> None:
    for problem in check(changed(changes)):
        for value in problem.legal:
            if not isinstance(value, str) or value in ("auto", "per_step"):
                value = tuple(value) if isinstance(value, list) else value
                still = check(changed({**changes, problem.key: value}))
                assert problem.key not in [p.key for p in still]


def test_every_rule_is_broken_by_one_of_these_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """R88: there is no rule whose message nobody has read: all places that make one are come to."""
    sources, make, come_to = [Path(rules.__file__), Path(run_rules.__file__)], Problem.__init__, set()

    def noting(self: Problem, *arguments: Any) -> None:
        caller = sys._getframe(1)
        come_to.add((Path(caller.f_code.co_filename), caller.f_lineno))
        make(self, *arguments)

    monkeypatch.setattr(Problem, "__init__", noting)
    for changes, _ in [*REFUSED, *PLANNED, *WARNED]:
        job = changed(changes)
        if not check(job):
            check_trainable(job)
            warnings(job)
    places = {
        (source, node.lineno): source.read_text(encoding="utf-8").splitlines()[node.lineno - 1].strip()
        for source in sources
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem"
    }
    assert len(places) > 40
    assert {place: text for place, text in places.items() if place not in come_to} == {}


@pytest.mark.parametrize(("changes", "messages"), REFUSED, ids=lambda v: str(v)[:60])
def test_a_reason_names_what_it_is_about(changes: dict[str, Any], messages: list[str]) -> None:
    """R88: the value is the job's own, and so is every other that the reason gives with its key."""
    job = changed(changes)
    for problem in check(job):
        assert _plain(problem.value) == _plain(value_at(job, problem.key))
        for key, value in NAMED_VALUE.findall(problem.reason):
            assert value == str(value_at(job, key)), problem


NAMED_VALUE = re.compile(r"(?<!only )\b((?:\w+\.)+\w+) = (\w+(?:\.\d+)?)")


def value_at(job: Any, key: str) -> Any:
    for name in key.split("."):
        job = getattr(job, name)
    return job


def _plain(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    return str(value).lower() if isinstance(value, bool) else str(value).strip('"')


def test_every_float_has_a_range_and_every_range_a_field() -> None:
    def floats(table: type, prefix: str = "") -> set[str]:
        found: set[str] = set()
        for name, hint in get_type_hints(table).items():
            inner = RopeScaling if name == "rope_scaling" else hint
            if isinstance(inner, type) and is_dataclass(inner):
                found |= floats(inner, f"{prefix}{name}.")
            elif hint in (float, tuple[float, ...]):
                found.add(prefix + name)
        return found

    assert floats(Job) == set(RANGES)


def test_the_default_split_leaves_no_stage_empty() -> None:
    for layers in range(1, 12):
        for pp in range(1, layers + 5):
            job = changed({"model.layers": layers, "parallel.pp": pp})
            refused = "parallel.pp" in [p.key for p in check(job)]
            assert refused == any(not decoder(job.model).stage(job.parallel, stage) for stage in range(pp))


def test_range() -> None:
    half_open = Range(0.0, 1.0, "[)")
    assert [v in half_open for v in (-0.1, 0.0, 0.5, 1.0, float("nan"))] == [False, True, True, False, False]
    assert (half_open.nearest(-1.0), half_open.nearest(2.0), half_open.nearest(float("nan"))) == ((0.0,), (), ())


def test_trainable() -> None:
    assert check_trainable(SOUND) == []
    assert check_trainable(changed({"model.block": "gpt", "model.kv_heads": 12})) == []


PLANNED: list[tuple[dict[str, Any], str]] = [
    ({"parallel.cp": 2}, "parallel.cp = 2: context parallelism is planned but not run yet; nearest legal: 1"),
    (
        {"parallel.ep": 2, "model.experts": Experts(count=8, top_k=2, ffn=64)},
        "parallel.ep = 2: expert parallelism is planned but not run yet; nearest legal: 1",
    ),
    (
        {"model.experts": Experts(count=8, top_k=2, ffn=64)},
        "model.experts = 8 experts: known to the planner only so far: it cannot be trained",
    ),
    (
        {"model.latent": LatentAttention(kv_rank=64, nope_dim=8, rope_dim=8, v_dim=8)},
        "model.latent = kv_rank 64: known to the planner only so far: it cannot be trained",
    ),
]


@pytest.mark.parametrize(("changes", "message"), PLANNED)
def test_what_is_only_planned_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    job = changed(changes)
    assert check(job) == []
    assert message in [str(problem) for problem in check_trainable(job)]


WARNED: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"parallel.pp": 4}, []),  # as many microbatches as stages
    (
        {"parallel.pp": 6},
        [
            "batch.global_batch = 32: 4 microbatches do not fill 6 pipeline stages: bubble ratio (p - 1) / m = 5 / 4 "
            "= 1.25; nearest legal: 48"
        ],
    ),
    (
        {"parallel.zero": 3},
        [
            "parallel.zero = 3: weights are gathered twice for each of m = 4 microbatches: data-parallel traffic per "
            "step is 3·m·Ψ = 12·Ψ, where ZeRO-1 moves 2·Ψ (Ψ: the stage's parameters); nearest legal: 1, 2"
        ],
    ),
    (
        {"parallel.zero": 3, "parallel.gather": "per_use", "parallel.reduce": "per_step"},
        [
            "parallel.gather = per_use: weights are gathered twice for each of m = 4 microbatches: data-parallel "
            "traffic per step is (2·m + 1)·Ψ = 9·Ψ, where ZeRO-1 moves 2·Ψ (Ψ: the stage's parameters); "
            "nearest legal: per_step"
        ],
    ),
    ({"parallel.zero": 3, "parallel.gather": "per_step"}, []),
    ({"parallel.zero": 3, "parallel.pp": 1}, []),
    ({"parallel.zero": 3, "parallel.dp": 2, "parallel.dp_replicate": 2}, []),
]


@pytest.mark.parametrize(("changes", "messages"), WARNED, ids=lambda v: str(v)[:60])
def test_warnings(changes: dict[str, Any], messages: list[str]) -> None:
    job = changed(changes)
    assert check(job) == []
    assert [str(p) for p in warnings(job)] == messages
