"""Time: collectives by where ranks sit, pipelines by formula and by replay, parts that sum to the step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint.flops import train_flops_per_token
from trigrid.grid import Grid
from trigrid.plan.constants import constants, of_generation, shipped
from trigrid.plan.machine import Machine, make_machine
from trigrid.plan.network import LOCAL, Group, Network
from trigrid.plan.setup import Setup
from trigrid.plan.software import SOFTWARE
from trigrid.plan.step import LINKS, PARTS, Step
from trigrid.spec.cluster import Cluster, Tier
from trigrid.spec.gpu import gpus, load_gpu
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec
from trigrid.spec.models import load_model

H100 = make_machine(load_gpu("h100"))


@cache
def model(name: str) -> ModelSpec:
    return load_model(name)


def step(name: str = "llama3-8b", software: str = "megatron", machine: Machine = H100) -> Step:
    return Step(model(name), machine, SOFTWARE[software])


# Constants


@pytest.mark.parametrize("name", constants())
def test_constants_have_bounds_units_and_provenance(name: str) -> None:
    constant = constants()[name]
    assert constant.low <= constant.value <= constant.high
    assert constant.unit
    assert len(constant.about) > 10
    assert constant.rows, "neither fitted nor from a source"


def test_no_constant_is_of_a_source_or_a_model() -> None:
    allowed = {"volta", "ampere", "hopper", "blackwell", "early", "deepspeed", "eager", "fused", "opa"}
    allowed |= {"half", "fp8", "fp8-rowwise", "unfused", "blocking", "flash1", "flash2"}
    for name in constants():
        for part in name.split(".")[1:]:
            known = part in allowed or "_" in part or part in {"unaligned", "slowdown", "tail", "share", "grouped"}
            assert known or name.startswith("interval"), name


def test_a_generation_without_rows_borrows_from_the_nearest() -> None:
    assert of_generation(shipped(), "nic", "blackwell") == shipped()["nic.hopper"]
    assert of_generation(shipped(), "gemm", "ada", "half") == shipped()["gemm.ampere.half"]


# Where groups sit


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 3, 4, 8, 16]),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3]),
    dp=st.sampled_from([1, 2, 5, 8]),
    node=st.sampled_from([1, 4, 8, 72]),
    leaf=st.sampled_from([1, 2, 32]),
)
def test_placement_equals_the_grids(tp: int, cp: int, pp: int, dp: int, node: int, leaf: int) -> None:
    """R45: size, ranks in one node and tier of each group are those that listing its ranks gives."""
    grid = Grid(Layout(tp=tp, cp=cp, pp=pp, dp=dp), Cluster(gpus_per_node=node, nodes_per_leaf=leaf))
    machine = make_machine(load_gpu("h100"), gpus_per_node=node, nodes_per_leaf=leaf)
    found = step(machine=machine).groups(Setup(tp=tp, cp=cp, pp=pp, dp=dp))
    for name, group in (("tp", found.tp), ("cp", found.cp), ("zero", found.zero), ("batch", found.batch)):
        ranks = grid.group(name, 0)
        assert (group.size, group.tier) == (len(ranks), grid.tier(ranks)), name
        assert group.inside == sum(rank < node for rank in ranks), name


def test_tensor_parallelism_over_nodes_is_seen_and_slow() -> None:
    """R45: TP 16 on nodes of 8 leaves the NVLink domain, and in an NVL72 rack it does not."""
    h100 = step(machine=make_machine(load_gpu("h100"), nic_Bps=12.5e9))
    gb200 = step(machine=make_machine(load_gpu("gb200")))
    setup = Setup(tp=16, dp=2, microbatches=4, sequence=8192)
    assert h100.groups(setup).tp.tier is Tier.LEAF
    assert gb200.groups(setup).tp.tier is Tier.NVLINK
    inside = h100.time(setup._replace(tp=8, dp=4))
    assert h100.time(setup).parts_s["tp"] > 2 * inside.parts_s["tp"]


# Collectives


def test_an_all_gather_in_a_node_is_the_ring() -> None:
    network = Network(H100)
    group, payload = Group(8, 8, 1, Tier.NVLINK), 8e9
    expected = payload * 7 / 8 / H100.nvlink + 7 * shipped()["hop.nvlink_s"]
    assert network.gather_s(payload, group) == pytest.approx(expected)
    assert network.reduce_s(payload, group) == pytest.approx(2 * expected)
    assert network.gather_s(payload, LOCAL) == 0


def test_a_group_with_more_ranks_in_a_node_has_more_nics() -> None:
    network = Network(H100)
    one, eight = Group(16, 1, 16, Tier.LEAF), Group(16, 8, 2, Tier.LEAF)
    assert network.gather_s(1e10, one) > 6 * network.gather_s(1e10, eight)


def test_the_spine_divides_by_its_oversubscription() -> None:
    plain, thin = (Network(make_machine(load_gpu("h100"), oversubscription=n)) for n in (1.0, 4.0))
    far, near = Group(64, 1, 64, Tier.SPINE), Group(64, 1, 64, Tier.LEAF)
    assert thin.gather_s(1e10, far) > 3.5 * plain.gather_s(1e10, far)
    assert thin.gather_s(1e10, near) == plain.gather_s(1e10, near)
    assert thin.message_s(1e9, Tier.SPINE) > 3.5 * plain.message_s(1e9, Tier.SPINE)


def test_thousands_of_ranks_are_bound_by_latency() -> None:
    """modelling.md, time item 4: the latency of pure ZeRO-3 over thousands of ranks; HSDP takes it away."""
    network = Network(H100)
    small, large = Group(8, 8, 1, Tier.NVLINK), Group(8192, 8, 1024, Tier.SPINE)
    assert network.gather_s(1e3, large) > 100 * network.gather_s(1e3, small)


# Pipelines


@pytest.mark.parametrize(("pp", "m", "virtual"), [(4, 8, 1), (4, 16, 2), (8, 8, 1), (3, 9, 3)])
def test_equal_stages_idle_by_the_formula(pp: int, m: int, virtual: int) -> None:
    """idle ÷ busy = (p − 1)/(v · m), replayed and in closed form, where stages are equal and messages free."""
    name = "interleaved" if virtual > 1 else "1f1b"
    spec = replace(model("llama3-8b"), layers=pp * virtual * 16, vocab=8)
    machine = make_machine(load_gpu("h100"), nic_Bps=1e30, nvlink_Bps=1e30)
    values = {**shipped(), "hop.nic_s": 0.0, "hop.nvlink_s": 0.0}
    setup = Setup(pp=pp, microbatches=m, virtual=virtual, schedule=name, sequence=2048)
    middle = Step(spec, replace(machine, values=values), SOFTWARE["megatron"])
    # Sixteen blocks a stage and a vocabulary of eight: embedding and head are next to nothing.
    for play in (False, True):
        assert middle.time(setup, play=play).bubble_ratio == pytest.approx((pp - 1) / (virtual * m), rel=0.02)


@settings(max_examples=40, deadline=None)
@given(
    split=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    m=st.integers(1, 9),
    name=st.sampled_from(["1f1b", "gpipe"]),
    recompute=st.sampled_from(["none", "full"]),
)
def test_the_closed_form_is_never_below_the_replay(split: list[int], m: int, name: str, recompute: str) -> None:
    """For unequal stages an upper bound; equal to the replay where all stages are."""
    spec = replace(model("llama3-8b"), layers=sum(split))
    setup = Setup(
        pp=len(split), stage_layers=tuple(split), microbatches=m, schedule=name, recompute=recompute, sequence=1024
    )
    prices = Step(spec, H100, SOFTWARE["megatron"])
    closed, played = prices.time(setup).step_s, prices.time(setup, play=True).step_s
    assert closed >= played * (1 - 1e-9)


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipev"])
def test_zero_bubble_schedules_idle_less_than_1f1b(name: str) -> None:
    """P29: (p − 1)(F + I − W) of zb-h1 and less of V shapes, all replayed."""
    prices = step("llama3-70b")
    base = Setup(tp=8, pp=4, microbatches=16, sequence=4096)
    virtual = 1 if name == "zb-h1" else 2
    better = prices.time(base._replace(schedule=name, virtual=virtual), play=True)
    assert better.bubble_ratio < prices.time(base, play=True).bubble_ratio


def test_virtual_stages_shrink_the_bubble_of_405b() -> None:
    """modelling.md: without virtual stages the bubble is 15/16 of the work at 16 microbatches; v = 4 explains 400."""
    prices = step("llama3-405b")
    base = Setup(tp=8, pp=16, dp=128, microbatches=16, sequence=8192, zero=2)
    plain = prices.time(base, play=True)
    virtual = prices.time(base._replace(virtual=4, schedule="interleaved"), play=True)
    assert plain.bubble_ratio == pytest.approx(15 / 16, rel=0.06)
    assert virtual.bubble_ratio < plain.bubble_ratio / 2.5


# Parts


SETUPS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 8]),
        "pp": st.sampled_from([1, 2, 4]),
        "cp": st.sampled_from([1, 2]),
        "dp": st.sampled_from([1, 4, 32]),
        "zero": st.sampled_from([0, 1, 2]),
        "reduce_per_microbatch": st.booleans(),
        "microbatches": st.sampled_from([1, 4, 12]),
        "micro_batch": st.sampled_from([1, 2]),
        "sequence": st.sampled_from([1024, 8192]),
        "sequence_parallel": st.booleans(),
        "recompute": st.sampled_from(["none", "selective", "full"]),
    }
).map(lambda fields: Setup(**fields))


@settings(max_examples=80, deadline=None)
@given(
    setup=SETUPS,
    three=st.booleans(),
    software=st.sampled_from(sorted(SOFTWARE)),
    name=st.sampled_from(["llama3-8b", "gpt3-175b", "mixtral-8x7b"]),
)
def test_parts_sum_and_nothing_is_exposed_beyond_its_link(setup: Setup, three: bool, software: str, name: str) -> None:
    """P18: and no layout uses more than the accelerator has."""
    if three:
        setup = setup._replace(zero=3, gather_per_use=True, reduce_per_microbatch=True)
    timed = step(name, software).time(setup)
    assert tuple(timed.parts_s) == PARTS
    assert tuple(timed.links_s) == LINKS
    assert sum(timed.parts_s.values()) == pytest.approx(timed.step_s)
    assert min(timed.parts_s.values()) >= 0
    for part, link in timed.links_s.items():
        assert timed.parts_s[part] <= link * (1 + 1e-9) + 1e-12, part
    tokens = setup.dp * setup.micro_batch * setup.microbatches * setup.sequence
    flops = tokens * train_flops_per_token(model(name), setup.sequence, causal=True)
    assert flops / timed.step_s / setup.world <= H100.gpu.peak_flops["bf16"]


@settings(max_examples=40, deadline=None)
@given(setup=SETUPS, software=st.sampled_from(sorted(SOFTWARE)))
def test_more_bandwidth_is_never_slower(setup: Setup, software: str) -> None:
    base = make_machine(load_gpu("h100"))
    for faster in (
        replace(base, nic_Bps=2 * base.nic_Bps),
        replace(base, nvlink_Bps=2 * base.nvlink_Bps),
        replace(base, gpu=replace(base.gpu, hbm_Bps=2 * base.gpu.hbm_Bps)),
    ):
        slow = step(software=software, machine=base).time(setup).step_s
        assert step(software=software, machine=faster).time(setup).step_s <= slow * (1 + 1e-9)


def test_recomputation_costs_a_forward() -> None:
    """P33: full recomputation adds about a third of the compute, selective less."""
    prices, base = step(), Setup(microbatches=4, sequence=8192)
    none, selective, full = (
        prices.time(base._replace(recompute=kind)).parts_s["compute"] for kind in ("none", "selective", "full")
    )
    assert none <= selective <= full
    assert 1.25 < full / none < 1.40


def test_zero_3_under_a_pipeline_moves_three_times_the_microbatches() -> None:
    """design.md: 3·m·Ψ against 2·Ψ."""
    prices = step("llama3-70b")
    one = Setup(tp=8, pp=4, dp=8, microbatches=8, sequence=4096)
    three = one._replace(zero=3, gather_per_use=True, reduce_per_microbatch=True)
    moved = [prices.traffic_bytes(setup)["zero"] for setup in (one, three)]
    # Bytes per parameter: (2 · 2 + 4) · 8 microbatches against 2 + 4, weights in bf16 and gradients in fp32.
    assert moved[1] / moved[0] == pytest.approx(64 / 6, rel=0.01)
    assert prices.time(three).step_s > prices.time(one).step_s


def test_asynchronous_tensor_parallelism_gains_what_was_published() -> None:
    """modelling.md, time item 5: + 9–10 % on 70B, H100, TP 8 in bf16."""
    spec, machine = load_model("llama3-70b"), make_machine(load_gpu("h100-96g-500w"))
    plain = SOFTWARE["fsdp2-compiled"]
    setup = Setup(
        tp=8, dp=32, micro_batch=16, sequence=8192, recompute="full", zero=3, gather_per_use=True,
        reduce_per_microbatch=True,
    )  # fmt: skip
    times = [Step(spec, machine, s).time(setup).step_s for s in (plain, replace(plain, overlap_tp="async"))]
    assert 1.04 < times[0] / times[1] < 1.15


def test_only_copies_of_the_model_wait_for_one_another_once_a_step() -> None:
    """modelling.md, time item 8."""
    prices = step()
    shares = []
    for setup in (Setup(tp=8, pp=4, microbatches=8), Setup(dp=32), Setup(dp=1024), Setup(dp=512, cp=4)):
        timed = prices.time(setup._replace(sequence=4096))
        shares.append(timed.parts_s["jitter"] / (timed.step_s - timed.parts_s["jitter"] - timed.parts_s["fixed"]))
    share = shipped()["jitter.share"]
    assert shares == pytest.approx([0.0, share / 2, share, share])


def test_small_models_are_bound_by_launches() -> None:
    """P22: a tiny model takes as long with half the tokens."""
    spec = replace(load_model("qwen3-0.6b"), hidden=256, ffn=512, heads=4, kv_heads=4, head_dim=64, vocab=512)
    prices = Step(spec, H100, SOFTWARE["fsdp2"])
    times = [prices.time(Setup(sequence=s)).parts_s["compute"] for s in (128, 256)]
    assert times[1] < 1.2 * times[0]


def test_unaligned_heads_are_slow() -> None:
    """Heads of 108 elements fall off the tensor cores' path in unfused attention (BigScience's 128-head runs), to the
    FP32 units, which have 19.5 of 312 TFLOP/s; heads of 112 do not."""
    spec = replace(load_model("gpt3-175b"), hidden=13824, ffn=4 * 13824)
    wide, near, odd = (replace(spec, heads=128, kv_heads=128, head_dim=dim) for dim in (144, 112, 108))
    machine = make_machine(load_gpu("a100"))
    setup = Setup(tp=8, sequence=2048, recompute="full", sequence_parallel=False)
    software = SOFTWARE["megatron-deepspeed"]
    times = [Step(s, machine, software).time(setup).parts_s["compute"] for s in (wide, near, odd)]
    assert times[1] < times[0] < times[2]
    assert times[2] > 1.1 * times[1]
    fused = replace(software, kernels=replace(software.kernels, fused_attention=True))
    assert Step(odd, machine, fused).time(setup).step_s < Step(wide, machine, fused).time(setup).step_s


def test_a_host_that_waits_for_every_kernel_costs_their_launches() -> None:
    """CUDA_LAUNCH_BLOCKING=1: a fixed time per microbatch, whatever its size."""
    spec, machine = load_model("gpt3-175b"), make_machine(load_gpu("a100"))
    plain = SOFTWARE["megatron-deepspeed"]
    extra = []
    for micro_batch in (1, 4):
        setup = Setup(tp=8, micro_batch=micro_batch, sequence=2048, recompute="full", sequence_parallel=False)
        times = [Step(spec, machine, replace(plain, blocking=b)).time(setup).parts_s["compute"] for b in (False, True)]
        extra.append(times[1] - times[0])
    assert extra[1] == pytest.approx(extra[0])
    assert 0.1 < extra[0] < 1.0


def test_ranks_far_from_their_nic_are_slower() -> None:
    machines = [make_machine(load_gpu("a100"), fabric=fabric) for fabric in ("", "opa", "opa_far")]
    assert machines[0].nic >= machines[1].nic > machines[2].nic


def test_a_loss_of_one_kernel_each_way_moves_a_quarter() -> None:
    spec, software = load_model("llama3-8b"), SOFTWARE["fsdp"]
    kernels = [replace(software.kernels, loss=loss) for loss in ("in-place", "unfused")]
    times = [Step(spec, H100, replace(software, kernels=k)).time(Setup(sequence=4096)).step_s for k in kernels]
    moved = 9 * 4096 * spec.vocab * 2 / (H100.gpu.hbm_Bps * shipped()["hbm.eager"])
    assert times[1] - times[0] == pytest.approx(moved, rel=0.05)


def test_an_imbalance_of_experts_costs_time() -> None:
    prices = step("mixtral-8x7b")
    base = Setup(dp=8, ep=8, microbatches=4, sequence=4096)
    even, uneven = (prices.time(base._replace(imbalance=n)) for n in (1.0, 1.5))
    assert even.step_s < uneven.step_s < 1.5 * even.step_s
    assert uneven.parts_s["ep"] > even.parts_s["ep"] > 0


@pytest.mark.parametrize("gpu", gpus())
def test_every_accelerator_prices_a_step(gpu: str) -> None:
    machine = make_machine(load_gpu(gpu))
    number_format = "bf16" if "bf16" in machine.gpu.formats else "fp16"
    timed = Step(load_model("llama3-8b"), machine, SOFTWARE["megatron"], number_format).time(Setup(sequence=4096))
    assert 0.1 < timed.step_s < 20
