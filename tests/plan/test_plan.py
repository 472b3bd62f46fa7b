"""The public object: contract, verdicts, warnings with their cost, explanations, goodput."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from trigrid.errors import Refused
from trigrid.job import load_job
from trigrid.plan.explain import FORMULAS, explain
from trigrid.plan.figures import figures
from trigrid.plan.goodput import MTBF_GPU_S, STALL_S, WRITE_S, LongRun, best_interval_s, expected, goodput
from trigrid.plan.memory import RESERVED_ONLY
from trigrid.plan.notes import notes
from trigrid.plan.plan import DOES_NOT_FIT, SAFE, TIGHT, Plan, as_json, make_plan, step_for
from trigrid.plan.software import SOFTWARE, load_software
from trigrid.plan.traffic import step_traffic
from trigrid.spec.cluster import Cluster
from trigrid.spec.job import Batch, Job, Optimizer, Run
from trigrid.spec.layout import Layout
from trigrid.spec.models import load_model
from trigrid.spec.rules import check


@cache
def job(name: str = "llama3-8b", batch: int = 128, sequence: int = 8192, gpu: str = "h100", **layout: Any) -> Job:
    return Job(
        model=load_model(name),
        batch=Batch(global_batch=batch, sequence=sequence),
        run=Run(steps=10),
        parallel=Layout(**layout),
        cluster=Cluster(gpu=gpu),
    )


def _numbers(told: Any) -> Iterator[float]:
    for value in told.values() if isinstance(told, dict) else told if isinstance(told, list) else ():
        if isinstance(value, dict | list):
            yield from _numbers(value)
        elif isinstance(value, float):
            yield value


def codes(plan: Plan) -> set[str]:
    return {note.code for note in plan.warnings}


def test_the_json_contract() -> None:
    """The keys that the issue promises, with numbers that agree with the object."""
    plan = make_plan(job(tp=2, pp=2, dp=4))
    told = json.loads(json.dumps(as_json(plan), allow_nan=False))
    assert told["schema"] == "trigrid.plan/1"
    assert told["model"]["parameters"] == 8_030_261_248
    layout = "tp cp pp dp ep zero schedule virtual_stages micro_batch global_batch recompute"
    assert set(told["layout"]) == set(layout.split())
    assert told["memory"]["ceiling_bytes"] == plan.ceiling_bytes
    assert [stage["stage"] for stage in told["memory"]["stages"]] == [0, 1]
    for stage in told["memory"]["stages"]:
        assert sum(stage["by_category"].values()) == stage["total_bytes"]
        assert stage["allocated_bytes"] <= stage["reserved_bytes"] <= stage["total_bytes"]
    assert told["fits"] is plan.fits()
    time = told["time"]
    assert time["step_s"]["low"] < time["step_s"]["best"] < time["step_s"]["high"]
    assert sum(time["parts_s"].values()) == pytest.approx(time["step_s"]["best"])
    assert {"bubble_ratio", "idle_share"} <= set(time)
    names = {"tokens_per_s", "tokens_per_s_per_gpu", "mfu_full_attention", "mfu_causal"}
    assert set(told["throughput"]) == names
    assert told["throughput"]["mfu_causal"] < told["throughput"]["mfu_full_attention"] < 1
    assert all(set(note) == {"code", "message"} for note in told["warnings"])
    assert told["assumptions"]


def test_what_is_frozen_has_no_gradients_moments_and_sums() -> None:
    """Of half of the layers and the embedding: less time and memory; of them nothing is reduced."""
    trained = job(tp=2, pp=2, dp=4, zero=2)
    half = tuple(f"layers.{number}.*" for number in range(16))
    frozen = make_plan(replace(trained, optimizer=Optimizer(frozen=("embedding.*", *half))))
    whole = make_plan(trained)
    first, last = ([plan.stages[place].memory.use.state for plan in (frozen, whole)] for place in (0, 1))
    assert first[0] == (first[1][0], 0, 0, 0)
    assert last[0] == last[1]
    # A product's weight has a third of its operations.
    mine, other = (plan.time.pipeline.stages[0] for plan in (frozen, whole))
    assert mine.weight_s == 0 < other.weight_s
    assert mine.total_s < 0.75 * other.total_s
    # Weights of ZeRO-2 are gathered after an update, of which there is none here.
    assert frozen.traffic_bytes.get("zero", 0.0) == 0 < whole.traffic_bytes["zero"]


def test_logits_in_pieces_are_planned_as_the_engine_runs_them() -> None:
    """R89: 4,096 tokens of 128,256 logits over TP 2: the softmax in fp32 is kept and the logits are worked on; in four
    pieces neither is but for a piece, the head's weight gradient is made and added up in fp32, and the product runs
    again."""
    whole, pieces = (make_plan(job(batch=8, sequence=4096, tp=2, loss_chunks=count)) for count in (1, 4))
    tokens, logits, hidden = 4096, 128_256 // 2, 4096
    kept = tokens * hidden * (2 // 2 + 2)
    spike, summed = tokens * logits * (2 + 4), logits * hidden * 4
    held = [plan.stages[0].memory.ledger["logits"] for plan in (whole, pieces)]
    assert held[0] == pytest.approx(kept + spike, rel=1e-3)
    assert held[1] == pytest.approx(kept + spike // 4 + summed + summed // 2, rel=0.02)
    assert pieces.time.parts_s["compute"] > whole.time.parts_s["compute"]


def test_inputs_gathered_again_are_planned_as_the_engine_runs_them() -> None:
    """Korthikanti 2022, section 4.2.2: 1/tp of two inputs a block is kept, for two all-gathers more of the eight."""
    usual, again = (make_plan(job(batch=8, tp=4, regather=flag)) for flag in (False, True))
    saved = usual.stages[0].memory.ledger["activations"] - again.stages[0].memory.ledger["activations"]
    assert saved == 32 * 2 * (2 * 8192 * 4096) * 3 // 4
    assert again.time.links_s["tp"] / usual.time.links_s["tp"] == pytest.approx(10 / 8, rel=0.01)


def test_it_fits_or_not_and_says_by_how_much() -> None:
    """P25, R88: the answer, for this accelerator or for any, and the constraint that failed."""
    small, large = make_plan(job(dp=8, zero=3, recompute="full")), make_plan(job("llama3-405b", tp=8, dp=16))
    assert small.fits()
    assert not small.fits(hbm_bytes=20 * 2**30)
    assert not large.fits()
    assert {stage.verdict for stage in large.stages} == {DOES_NOT_FIT}
    (note,) = [note for note in large.warnings if note.code == "does-not-fit"]
    over = (large.fullest.memory.total_bytes - large.ceiling_bytes) / 2**30
    assert f"needs {over:.1f} GiB more" in note.message
    assert "recomputation" in note.message


def test_verdicts_keep_the_margin_apart() -> None:
    """P30: what is not modelled is a margin beside the ledger, and decides between SAFE and TIGHT."""
    wanted = job(dp=8, zero=3, recompute="full")
    plan = make_plan(wanted)
    (stage,) = plan.stages
    assert stage.verdict == SAFE
    assert stage.margin_bytes > 0
    assert "margin" not in stage.memory.ledger.bytes
    verdicts = []
    for micro_batch in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64):
        batch = replace(wanted.batch, micro_batch=micro_batch, global_batch=8 * micro_batch)
        (stage,) = make_plan(replace(wanted, batch=batch)).stages
        total, ceiling = stage.memory.total_bytes, plan.ceiling_bytes
        over, near = total > ceiling, total + stage.margin_bytes > ceiling
        assert stage.verdict == (DOES_NOT_FIT if over else TIGHT if near else SAFE)
        verdicts.append(stage.verdict)
    assert verdicts == sorted(verdicts, key=[SAFE, TIGHT, DOES_NOT_FIT].index)
    assert verdicts[0] == SAFE
    assert verdicts[-1] == DOES_NOT_FIT


def test_the_mission_planners_example() -> None:
    """mission.md: 64 GPUs at TP 8 and PP 4 leave DP 2; 3,420 tokens/s would be 3 % MFU: contradicted."""
    shape = replace(load_model("llama3-70b"), name="99b", hidden=10240, layers=76, heads=80, head_dim=128, ffn=28672)
    wanted = replace(job(batch=64, sequence=4096, tp=8, pp=4, dp=2), model=shape)
    assert 64 // (8 * 4) == 2
    plan = make_plan(wanted, SOFTWARE["megatron"])
    assert 80e9 < plan.parameters < 110e9
    flops_of_3420 = 3420 * plan.mfu_full_attention / plan.tokens_per_s
    assert flops_of_3420 < 0.06
    assert plan.tokens_per_s > 5 * 3420
    assert plan.time.idle_share == pytest.approx(plan.time.bubble_ratio / (1 + plan.time.bubble_ratio))


def test_tensor_parallelism_across_nodes_is_warned_with_its_seconds() -> None:
    """R45: each TP group inside one node, given the node's size."""
    crossing = make_plan(job("llama3-70b", tp=16, dp=8))
    (note,) = [note for note in crossing.warnings if note.code == "tp-crosses-nodes"]
    assert "tp of at most 8" in note.message
    assert f"{crossing.time.parts_s['tp']:.3g} s" in note.message
    assert "tp-crosses-nodes" not in codes(make_plan(job("llama3-70b", tp=8, dp=8)))
    rack = replace(job("llama3-70b", tp=16, dp=4, gpu="gb200"), cluster=Cluster(gpu="gb200", gpus_per_node=72))
    assert "tp-crosses-nodes" not in codes(make_plan(rack))
    ordered = replace(job("llama3-70b", tp=8, dp=8), parallel=Layout(tp=8, dp=8, order=("tp", "pp", "cp", "dp")))
    assert "tp-crosses-nodes" in codes(make_plan(ordered))


def test_zero_3_under_a_pipeline_is_warned_with_what_would_replace_it() -> None:
    plan = make_plan(job("llama3-70b", tp=8, pp=2, dp=8, zero=3))
    (note,) = [note for note in plan.warnings if note.code == "zero-traffic"]
    assert "twice for each of 16 microbatches: with the reductions 48 times" in note.message
    assert "GiB instead" in note.message
    per_step = replace(plan.job, parallel=replace(plan.job.parallel, gather="per_step", reduce="per_step"))
    assert "zero-traffic" not in codes(make_plan(per_step))


def test_more_than_the_peak_is_warned_of() -> None:
    """P18: a rate that no accelerator can reach means that a shape or a constant is wrong."""
    base = job(tp=2)
    plan = make_plan(base)
    step = step_for(base.model, base.cluster, plan.software, "bf16")
    found = notes(step, plan.setup, plan.time, 0, plan.ceiling_bytes, 1.03)
    assert [note.code for note in found] == ["mfu-above-1"]
    assert found[0].message.startswith("103% of the peak is impossible")


def test_a_plan_takes_milliseconds_once_its_pieces_are_priced() -> None:
    """P22: below 50 ms, on one core and without a GPU; here with four times that for a busy machine."""
    base = job("llama3-405b", batch=512, tp=8, pp=16, dp=4, recompute="full")
    make_plan(base)
    begun = process_time()
    make_plan(base)
    assert process_time() - begun < 0.2


def test_a_large_bubble_is_warned_of() -> None:
    assert "bubble" in codes(make_plan(job("llama3-70b", batch=16, tp=8, pp=8, dp=2)))
    assert "bubble" not in codes(make_plan(job("llama3-8b", dp=8)))


def test_every_printed_figure_explains_itself() -> None:
    """P8: formula, inputs and source; categories and parts are all among them."""
    base = job(tp=2, pp=2, dp=4, dp_replicate=2)
    plan = make_plan(replace(base, cluster=replace(base.cluster, price=2.0)))
    known = figures(plan)
    assert set(known) == set(FORMULAS)
    for figure, (value, unit) in known.items():
        told = explain(plan, figure)
        assert (told.value, told.unit) == (value, unit)
        assert told.formula
        assert told.source
        assert set(told.inputs) == set(FORMULAS[figure].inputs) != set()
    for told_json in (as_json(plan), plan.training(1e12).__dict__):
        numbers = list(_numbers(told_json))
        # Neither counts of a layout nor what is told of each stage are figures with a formula of their own.
        assert {value for value in numbers if isinstance(value, float)} <= {value for value, _ in known.values()} | {
            goodput(16).stall_share,
            goodput(16).lost_share,
            goodput(16).restart_share,
        }
    weights = explain(plan, "memory.weights")
    assert weights.value == plan.fullest.memory.ledger["weights"]
    assert weights.inputs["policy.weights"] == 2
    with pytest.raises(Refused, match="no figure of a plan") as refused:
        explain(plan, "memory.activation")
    assert "memory.activations" in refused.value.problems[0].legal


def test_traffic_is_what_the_engine_counts() -> None:
    """R84: tensor-parallel and stage-boundary bytes exactly, ZeRO's up to padding."""
    wanted = job("llama3-8b", batch=16, sequence=4096, tp=2, pp=2, dp=2)
    told, counted = make_plan(wanted).traffic_bytes, step_traffic(wanted, 0)
    activations = [
        count.payload_bytes
        for (axis, kind), count in counted.items()
        if axis == "tp" and kind in ("all_gather", "reduce_scatter")
    ]
    assert told["tp"] == sum(activations)
    assert told["pp"] == counted["pp", "send"].payload_bytes + counted["pp", "receive"].payload_bytes
    zero = sum(count.payload_bytes for (axis, _), count in counted.items() if axis == "zero")
    assert told["zero"] == pytest.approx(zero, rel=1e-6)


def test_training_takes_time_energy_and_money() -> None:
    base = job("llama3-8b", dp=8)
    plan = make_plan(replace(base, cluster=Cluster(gpu="h100", price=2.0, pue=1.2, power_w=1000)))
    run = plan.training(1e12)
    assert run.seconds == pytest.approx(1e12 / plan.tokens_per_s)
    assert run.cost == pytest.approx(run.seconds / 3600 * 8 * 2.0)
    assert run.energy_kwh == pytest.approx(run.seconds / 3600 * 8 * 1.0 * 1.2)
    assert make_plan(base).training(1e12).cost is None


@pytest.mark.parametrize(
    ("name", "layout", "batch"),
    [
        ("deepseek-v3", {"pp": 8, "dp": 32, "ep": 32, "recompute": "full"}, 2048),
        ("mixtral-8x7b", {"tp": 2, "pp": 4, "dp": 8, "ep": 8}, 256),
        ("qwen3-235b-a22b", {"cp": 2, "pp": 2, "dp": 32, "ep": 16, "schedule": "zbv", "virtual_stages": 2}, 512),
        ("gpt3-175b", {"tp": 8, "pp": 8, "dp": 4, "schedule": "interleaved", "virtual_stages": 3}, 512),
    ],
)
def test_what_only_the_planner_knows_is_planned(name: str, layout: dict[str, Any], batch: int) -> None:
    sequence = min(4096, load_model(name).context)
    wanted = job(name, batch=batch, sequence=sequence, **layout)
    assert check(wanted) == []
    plan = make_plan(wanted, SOFTWARE["megatron"])
    assert plan.step_s.best > 0
    assert 0 < plan.mfu_causal < 1
    if "ep" in layout:
        assert plan.time.parts_s["ep"] > 0
        assert any("imbalance" in text for text in plan.assumptions)


def test_a_trillion_on_ten_thousand_plans_without_listing_ranks() -> None:
    """P21, issue item 4: from the description alone, and without a loop over ranks."""
    big = make_plan(job("megatron-1t", batch=10_000, sequence=2048, tp=8, pp=25, dp=50), SOFTWARE["megatron"])
    assert big.setup.world == 10_000
    assert len(big.stages) == 25
    assert sum(stage.layers for stage in big.stages) == 128


def test_a_gpu_or_software_that_is_unknown_is_refused() -> None:
    with pytest.raises(Refused, match="no accelerator"):
        make_plan(replace(job(), cluster=Cluster(gpu="h1000")))
    with pytest.raises(Refused, match="no software preset") as refused:
        load_software("megatrons")
    assert "megatron" in refused.value.problems[0].legal


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_shipped_job_is_sound_and_planned(path: Path) -> None:
    """R85: a recipe that ships is legal, planned in CI, and fits."""
    plan = make_plan(load_job(path, []))
    assert plan.fits()


def test_policies_are_named_with_their_bytes() -> None:
    """Law 5: a printed total says which convention it follows."""
    plan = make_plan(job())
    assert any("18 bytes of state per parameter (engine)" in text for text in plan.assumptions)
    fp32 = make_plan(replace(job(), run=Run(steps=1, precision="fp32")))
    assert any("16 bytes of state per parameter (engine-fp32)" in text for text in fp32.assumptions)


def test_meters_are_told_apart() -> None:
    """P6, P32."""
    memory = make_plan(job(dp=8)).stages[0].memory
    assert sorted(RESERVED_ONLY) == ["allocator", "runtime"]
    assert memory.allocated_bytes < memory.reserved_bytes < memory.total_bytes


# Goodput


def test_llama_3s_interruptions() -> None:
    """419 unexpected stops in 54 days on 16,384 GPUs: one in three hours."""
    job_mtbf = goodput(16_384).mtbf_job_s
    assert job_mtbf == pytest.approx(54 * 86400 / 419)
    years = MTBF_GPU_S / 3600 / 24 / 365
    assert years == pytest.approx(5.78, rel=0.01)


def test_plan_and_report_say_the_same() -> None:
    """One answer: what `trigrid report` calls the best interval, and its shares."""
    found = goodput(16_384)
    assert found.interval_s == best_interval_s(found.mtbf_job_s, STALL_S, WRITE_S)
    run = LongRun(mtbf_s=found.mtbf_job_s, interval_s=found.interval_s)
    assert found.productive_share == pytest.approx(expected(run)["productive"], rel=1e-12)
    assert found.interval_s == pytest.approx((2 * STALL_S * found.mtbf_job_s) ** 0.5, rel=0.02), "Young's, nearly"
    assert goodput(10**6).interval_s == WRITE_S


def test_more_gpus_are_less_productive() -> None:
    shares = [goodput(gpus).productive_share for gpus in (8, 1024, 16_384, 100_000)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert 0.85 < shares[2] < 0.97
    assert 0 <= goodput(10**8).productive_share < 1e-3
