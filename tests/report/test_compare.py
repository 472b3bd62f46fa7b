"""A run beside its plan: what is pooled, what is not known, and what is called the largest gap."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import named, small_job
from helpers.samples import Folder, PRODUCTS_Fps

from trigrid.blueprint.flops import train_flops_per_token
from trigrid.errors import Refused
from trigrid.plan.plan import make_plan
from trigrid.report.compare import Comparison, compare_run, planned_parts
from trigrid.report.compare_text import compare_json, compare_text, short_text
from trigrid.report.gaps import memory_gap, time_gap
from trigrid.report.measured import read_run
from trigrid.report.samples import PARTS
from trigrid.spec.job import Job

LAYOUTS = ("pp2dp2", "tp2pp2dp2", "dp2")


def job(name: str = "pp2dp2", **layout: Any) -> Job:
    return small_job(named(name, **layout), precision="bf16")


def found(folder: Folder) -> Comparison:
    return compare_run(read_run(folder.path, folder.clock))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Two stages, two replicas; started, with three steps of which two are sampled."""
    made = Folder(tmp_path / "run", job())
    made.start()
    made.trained(9.0, 1.0, 2.0)
    made.counted()
    return made


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"zero": 3, "recompute": "full"}])
def test_planned_parts_are_the_step(name: str, options: dict[str, Any]) -> None:
    plan = make_plan(job(name, **options))
    for stage in range(plan.setup.pp):
        parts = planned_parts(plan, stage)
        assert list(parts) == list(PARTS)
        assert sum(parts.values()) == pytest.approx(plan.step_s.best)
        assert min(parts.values()) >= -1e-12


def test_steps_are_those_after_the_first_of_each_start(folder: Folder) -> None:
    folder.start(done=3)
    folder.trained(7.0, 4.0, 3.0)
    run = read_run(folder.path, folder.clock)
    assert run.step_s
    assert (run.step_s.low, run.step_s.median, run.step_s.high, run.step_s.number) == (1.75, 2.5, 3.25, 4)
    assert (run.steps, run.others, run.cold) == (6, 0, False)


def test_another_layout_is_left_out(folder: Folder) -> None:
    folder.sampled()
    folder.start(job("dp2"), done=3)
    folder.trained(7.0, 4.0)
    folder.sampled()
    told = found(folder)
    assert told.run.job.parallel.pp == 1
    assert told.run.step_s
    assert (told.run.step_s.median, told.run.others, len(told.run.samples)) == (4.0, 1, 1)
    assert "1 earlier start in another layout left out" in compare_text(told)


def test_a_start_without_a_step_does_not_hide_the_one_before(folder: Folder) -> None:
    """The ranks of another layout failed before their first step."""
    folder.sampled()
    folder.start(job("dp2"), done=3)
    told = found(folder)
    assert told.run.job.parallel.pp == 2
    assert len(told.run.samples) == 1


def test_a_line_torn_at_any_place_is_left_out(folder: Folder) -> None:
    """A run that is under way, or was killed while it wrote."""
    folder.sampled()
    path = folder.path / "samples.jsonl"
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        told = found(folder)
        compare_text(told)
        assert told.run.job == folder.job
    assert len(told.run.samples) == 0
    assert told.run.counted


def test_a_run_of_a_version_without_samples(folder: Folder) -> None:
    (folder.path / "samples.jsonl").unlink()
    told = found(folder)
    assert told.run.step_s
    assert told.run.step_s.median == 1.5
    text = compare_text(told)
    assert "no step is sampled" in text
    assert "not measured" in text
    assert "none is sampled" in time_gap(told)
    assert compare_json(told)["parts_s"][0][0]["measured"] is None


def test_an_accelerator_that_nobody_knows(tmp_path: Path) -> None:
    """State, traffic and what was measured are told all the same."""
    made = Folder(tmp_path, job())
    made.start()
    made.trained(2.0, 1.0)
    made.counted()
    made.sampled({"compute": 1.0})
    for name in ("samples.jsonl", "job.toml"):
        path = made.path / name
        path.write_text(path.read_text().replace("h100", "x9000"))
    told = found(made)
    assert told.plan is None
    assert "no accelerator of the catalogue has this name" in told.unplanned
    assert time_gap(told) == "There is no plan of its times. Most of the measured step is compute: 98%."
    assert told.fullest["weights"].planned == told.fullest["weights"].measured
    assert "as planned, to the byte, on all 4 ranks" in memory_gap(told)
    assert compare_json(told)["step_s"]["planned"] is None
    compare_text(told)


def test_a_run_as_planned_has_no_gap(folder: Folder) -> None:
    plan = make_plan(folder.job)
    folder.trained(*[plan.step_s.best] * 9)
    folder.sampled()
    told = found(folder)
    assert told.same_machine
    for parts in told.parts:
        assert all(part.gap == pytest.approx(0.0, abs=1e-12) for part in parts)
    assert time_gap(told).startswith("The step is within the planned range.")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (
            {"more_s": {"compute": 1.0}},
            "Matrix products ran at 1.00 GFLOP/s per rank when the run began; the plan counts",
        ),
        ({"more_s": {"data": 1.0}}, "data, waited for: 1.00 s, planned 0.00 ms. The batch is late: data.workers"),
        ({"more_s": {"reduce": 1.0}}, "Either its network is slower than the plan's, or ranks come to it at different"),
        ({"more_s": {"other": 1.0}}, "the host's own work"),
        ({"more_s": {"reduce": 1.0}, "slowest": (3, 2.0, 1.0)}, "Rank 3 works 2.00 times as long as the other ranks"),
        ({"more_s": {"compute": 1.0}, "slowest": (3, 2.0, 1.0)}, "Rank 3 works 2.00 times as long as the other ranks"),
        ({"by_stage": {1: {"compute": 1.0}, 0: {"pipeline": 5.0}}}, "Matrix products ran at"),
        (
            {"by_stage": {1: {"compute": 1.0, "pipeline": 3.0}, 0: {"pipeline": 4.0}}},
            "Stage 1 computes 1.99 times as long as the mean of all stages",
        ),
    ],
)
def test_the_largest_gap_in_words(folder: Folder, sample: dict[str, Any], words: str) -> None:
    """R93: where one rank is late in most samples it is named."""
    for _ in range(3):
        folder.sampled(**sample)
    assert words in time_gap(found(folder))


def test_a_rank_that_is_late_once_is_not_named(folder: Folder) -> None:
    for rank in (1, 2, 3):
        folder.sampled({"reduce": 1.0}, slowest=(rank, 2.0, 1.0))
    assert found(folder).slowest is None


def test_ranks_that_share_cores_are_told(tmp_path: Path) -> None:
    made = Folder(tmp_path, job(), "cpu", 0.25)
    made.start()
    made.trained(2.0, 1.0)
    made.sampled({"reduce": 1.0})
    text = time_gap(found(made))
    assert text.startswith("The plan is for h100 and the run was on cpu, so their times are those of two machines")
    assert "4 ranks share cores, 0.25 each" in text


def test_state_that_is_not_as_planned_is_named(folder: Folder) -> None:
    """R84."""
    folder.counted(("rank 2: gradients 12, planned 10",), 2, gradients=12)
    folder.sampled()
    told = found(folder)
    assert memory_gap(told) == ("State or traffic is not as planned on 2 of 4 ranks: rank 2: gradients 12, planned 10.")
    assert "DIFFERS" in compare_text(told)
    assert told.memory[0]["gradients"].measured == 12


def test_traffic_that_is_not_as_planned_is_named(folder: Folder) -> None:
    name = "zero all_gather calls"
    folder.counted(("rank 0: …",), 1, **{name: 99})
    told = found(folder)
    (differs,) = [figure for figure in told.traffic[0] if figure.gap]
    assert (differs.name, differs.measured) == (name, 99)
    assert f"DIFFERS: stage 0: {name} 99, planned {differs.planned:,.0f}" in " ".join(compare_text(told).split())


def test_memory_beyond_the_margin_is_told(folder: Folder) -> None:
    """R84: allocated, reserved and what the device sees are three meters."""
    plan = make_plan(folder.job).fullest.memory
    peaks = {"allocated": 2 * plan.allocated_bytes, "reserved": plan.reserved_bytes, "device": plan.total_bytes}
    folder.sampled(peaks=peaks)
    told = found(folder)
    assert told.fullest["allocated"].gap == plan.allocated_bytes
    assert told.fullest["reserved"].gap == 0
    assert told.fullest["device"].gap == 0
    assert "(+100.0%), more than the plan's margin of" in memory_gap(told)


def test_on_a_cpu_nothing_is_called_allocated_that_is_only_resident(tmp_path: Path) -> None:
    made = Folder(tmp_path, job(), "cpu", 1.0)
    made.start()
    made.trained(2.0, 1.0)
    made.counted()
    made.sampled(peaks={"resident": 9 << 30, "grown": 2 << 30, "kept": 5000})
    told = found(made)
    plan = make_plan(made.job).fullest.memory
    assert told.fullest["allocated"].planned == plan.use.training_bytes
    assert "≤ 2.000 GiB" in compare_text(told)
    assert {"reserved", "device"}.isdisjoint(figure.name for figure in told.fullest.figures)


def test_json_has_what_the_page_has(folder: Folder) -> None:
    folder.sampled({"compute": 0.5}, slowest=(1, 2.0, 1.0))
    told = compare_json(found(folder))
    json.dumps(told, allow_nan=False)
    assert told["schema"] == "trigrid.compare/1"
    assert told["step_s"]["measured"] == {"low": 1.25, "median": 1.5, "high": 1.75, "number": 2}
    # Eight sequences of 16 tokens.
    assert told["tokens_per_s"]["measured"] == pytest.approx(128 / 1.5)
    for convention, causal in (("full_attention", False), ("causal", True)):
        flops = train_flops_per_token(folder.job.model, 16, causal=causal)
        share = told["mfu"]["of_its_own_products"][convention]
        assert share == pytest.approx(128 / 1.5 * flops / PRODUCTS_Fps)
    assert [stage["stage"] for stage in told["memory"]] == [0, 1]
    (compute,) = [part for part in told["parts_s"][0] if part["name"] == "compute"]
    assert compute["measured"] == pytest.approx(compute["planned"] + 0.5)


def test_the_short_form_is_short(folder: Folder) -> None:
    folder.sampled({"compute": 0.5})
    lines = short_text(found(folder)).splitlines()
    assert lines[0].startswith("a step: compute ")
    assert lines[-1] == f"more: trigrid compare {folder.path}"
    assert len(lines) < 12


def test_a_calibration_that_cannot_be_read_is_refused(folder: Folder) -> None:
    with pytest.raises(Refused, match=r"cluster\.calibration = nothing\.toml: cannot be read"):
        compare_run(read_run(folder.path, folder.clock), "nothing.toml")


def test_numbers_of_another_form_do_not_end_it(folder: Folder) -> None:
    """Lines of a later version."""
    folder.sampled()
    lives = folder.path / "samples.jsonl"
    with lives.open("a") as file:
        for line in ('{"kind": "sample"}', '{"kind": "counted", "stages": 3}', '{"kind": "new"}', "[]"):
            file.write(f"{line}\n")
    assert len(found(folder).run.samples) == 1


def test_jobs_that_differ_only_in_what_is_no_matter_are_pooled(folder: Folder) -> None:
    folder.sampled()
    folder.start(replace(folder.job, run=replace(folder.job.run, steps=99)), done=3)
    folder.trained(2.0, 1.0)
    folder.sampled()
    assert len(found(folder).run.samples) == 2
