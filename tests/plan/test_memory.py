"""Bytes of every stage, against exact counts, published formulas and the mission's figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint.decoder import parameter_count
from trigrid.blueprint.terms import Kernels
from trigrid.grid import Coord, grid_of
from trigrid.plan.beside import communicators, pairs
from trigrid.plan.constants import shipped
from trigrid.plan.engine_memory import memory_of
from trigrid.plan.memory import Memory
from trigrid.plan.setup import Setup, most_in_flight
from trigrid.plan.software import POLICIES, SOFTWARE, Software
from trigrid.plan.state import rank_state
from trigrid.schedule import in_flight, make_schedule
from trigrid.spec.job import Batch, Job, Run
from trigrid.spec.layout import Layout, ZeroStage, zero_policy
from trigrid.spec.model import ModelSpec
from trigrid.spec.models import load_model

GB = 10**9
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
SMALL = ModelSpec(
    name="small", hidden=96, layers=6, heads=12, kv_heads=4, head_dim=8, ffn=252, vocab=1001, context=64, qk_norm=True
)
ENGINE = SOFTWARE["trigrid"]


def memory(spec: ModelSpec, software: Software = ENGINE) -> Memory:
    return memory_of(spec, software, shipped())


def sharded(zero: int, **changes: object) -> Setup:
    base = Setup(zero=zero, gather_per_use=zero == 3, reduce_per_microbatch=zero >= 2)
    return base._replace(**changes)  # type: ignore[arg-type]


# State


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("tp", "pp", "dp", "copies"), [(1, 1, 1, 1), (2, 3, 4, 2), (12, 2, 3, 1), (1, 8, 5, 1)])
@pytest.mark.parametrize("zero", STAGES)
def test_state_equals_the_engines_own_count(
    zero: ZeroStage, tp: int, pp: int, dp: int, copies: int, tied: bool
) -> None:
    """R84: to the byte, with copied KV heads, a padded vocabulary, shards that do not divide, and empty ends."""
    spec = replace(SMALL, tied=tied)
    layout = Layout(tp=tp, pp=pp, dp=dp, dp_replicate=copies, zero=zero)
    job = Job(model=spec, batch=Batch(global_batch=dp, sequence=64), run=Run(steps=1), parallel=layout)
    policy = zero_policy(layout)
    late = policy.reduce_per_microbatch
    setup = Setup(tp=tp, pp=pp, dp=dp, dp_replicate=copies, zero=zero, reduce_per_microbatch=late)
    for stage in range(pp):
        rank = grid_of(job).rank(Coord(0, stage, 0, 0))
        exact = rank_state(job, rank)
        counted, _ = memory(spec).state(setup, stage)
        names = ("weights", "master", "gradients", "optimizer")
        assert dict(zip(names, counted, strict=True)) == {name: exact[name] for name in names}


@pytest.mark.parametrize("split", [(1, 2, 2, 1), (0, 3, 3, 0), (2, 2, 1, 1)])
def test_stages_sum_to_the_model(split: tuple[int, ...]) -> None:
    """P1, R84: uneven stages are counted one by one: nothing is averaged, nothing is lost."""
    counted = [memory(SMALL).state(Setup(pp=4, stage_layers=split), rank)[1] for rank in range(4)]
    assert sum(counted) == parameter_count(SMALL)
    assert len(set(counted)) > 1


def test_the_heaviest_uneven_stage_is_found() -> None:
    """P1: [1, 2, 2, 1] keeps more on its second stage than an average says."""
    setup = Setup(pp=4, stage_layers=(1, 2, 2, 1), microbatches=8, sequence=64)
    uses = [memory(SMALL).use(setup, rank) for rank in range(4)]
    assert max(use.layers for use in uses) == 2
    assert [use.layers for use in uses] == [1, 2, 2, 1]


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-0.6b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("pp", [1, 3, 8])
def test_every_parameter_is_on_one_stage(name: str, pp: int) -> None:
    """A tied weight is on two, and counted once where they are one."""
    spec = load_model(name)
    total = sum(memory(spec).state(Setup(pp=pp), rank)[1] for rank in range(pp))
    twice = spec.vocab * spec.hidden if spec.tied and pp > 1 else 0
    assert total == parameter_count(spec) + twice


# The mission's figures


def only_state(name: str, zero: int, dp: int, params: float) -> list[float]:
    """GB of weights, gradients and optimizer for `params` parameters under a named policy."""
    policy = POLICIES[name]
    shard = params / dp if zero else params
    kept = params / dp if zero >= 2 else params
    weights = params / dp * policy.weights if zero == 3 else params * policy.weights
    return [weights / GB, kept * policy.gradients / GB, shard * (policy.master + policy.moments) / GB]


def test_the_memory_wall_of_405_billion() -> None:
    """mission.md, 1: 810 GB of bf16 weights, 3,240 of fp32 moments, 810 of bf16 gradients, against 640 GB."""
    assert only_state("two-moments", 0, 1, 405e9) == [810, 810, 3240]
    assert sum(only_state("two-moments", 0, 1, 405e9)) - 640 == 4220


def test_the_memory_wall_of_a_trillion() -> None:
    """mission.md, 1: 2 TB of weights, 2 of gradients, 12 of optimizer: this one counts the master copy."""
    policy = POLICIES["megatron"]
    assert (policy.weights, policy.master + policy.moments) == (2, 12)
    assert only_state("two-moments", 0, 1, 1e12)[:2] == [2000, 2000]


@pytest.mark.parametrize(("zero", "total"), [(0, 96), (1, 40), (2, 26), (3, 12)])
def test_zero_of_eight_billion_on_eight_ranks(zero: int, total: int) -> None:
    """mission.md: 96, 40, 26 and 12 GB: the optimizer falls eightfold."""
    assert sum(only_state("two-moments", zero, 8, 8e9)) == total


def test_the_planners_example() -> None:
    """mission.md, 4: 99 billion parameters at TP 8, PP 4, DP 2 with ZeRO-1 hold 6.2 + 18.5 + 6.2 GB of state."""
    per_rank = 99e9 / 32
    weights, gradients, _ = only_state("two-moments", 1, 2, per_rank)
    optimizer = per_rank / 2 * 12 / GB
    assert [round(x, 1) for x in (weights, optimizer, gradients)] == [6.2, 18.6, 6.2]


# Activations


KORTHIKANTI = replace(
    SOFTWARE["megatron-2022"],
    kernels=Kernels(fused_attention=False, dropout=True, regather=True, loss="unfused"),
    step_bytes=0.0,
)


@pytest.mark.parametrize(("recompute", "factor"), [("none", None), ("selective", 34.0), ("full", 2.0)])
def test_korthikanti_per_stage(recompute: str, factor: float | None) -> None:
    """P12: a first stage of 1F1B holds p times its layers: 34·s·b·h/t, + 5·a·s²·b/t, or 2·s·b·h/t of inputs."""
    spec, s, b, t, p = load_model("gpt3-175b"), 2048, 1, 8, 8
    setup = Setup(tp=t, pp=p, microbatches=64, micro_batch=b, sequence=s, recompute=recompute)
    per_layer = factor * s * b * spec.hidden / t if factor else (34 * spec.hidden + 5 * spec.heads * s) * s * b / t
    use = memory(spec, KORTHIKANTI).use(setup, 0)
    embedding = memory(spec, KORTHIKANTI).unit("embedding", setup.cut, "none").saved if recompute != "full" else 0
    assert use.activations == pytest.approx(p * (12 * per_layer + embedding))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_context_parallelism_is_half_the_tokens(recompute: str) -> None:
    """P17: CP 2 with four sequences equals CP 1 with two."""
    spec = load_model("llama3-8b")
    base = Setup(sequence=8192, microbatches=4, recompute=recompute, zero=0)
    one, two = base._replace(micro_batch=2), base._replace(cp=2, micro_batch=4)
    uses = [memory(spec).use(setup, 0) for setup in (one, two)]
    assert uses[0].activations == uses[1].activations
    assert uses[0].logits == uses[1].logits


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["llama3-8b", "gpt3-175b", "deepseek-v3", "qwen3-8b"]),
    software=st.sampled_from(sorted(SOFTWARE)),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 5]),
    micro=st.sampled_from([1, 3]),
    zero=st.sampled_from(STAGES),
    sp=st.booleans(),
)
def test_recomputation_never_adds_memory(
    name: str, software: str, tp: int, pp: int, micro: int, zero: ZeroStage, sp: bool
) -> None:
    """P4: full keeps least, with one layer's working set at its peak."""
    counts = memory(load_model(name), SOFTWARE[software])
    base = sharded(zero, tp=tp, pp=pp, dp=4, micro_batch=micro, microbatches=6, sequence=2048, sequence_parallel=sp)
    kept = [
        max(counts.use(base._replace(recompute=kind), rank).training_bytes for rank in range(pp))
        for kind in ("none", "selective", "full")
    ]
    assert kept[0] >= kept[1] - 1
    assert kept[0] >= kept[2] - 1


def test_full_recomputation_keeps_a_layers_working_set() -> None:
    """P4: the peak of full recomputation holds what one layer saves, beside all inputs."""
    counts = memory(load_model("llama3-8b"))
    setup = Setup(sequence=8192, recompute="full", microbatches=1)
    block = counts.unit("llama", setup.cut, "none")
    use = counts.use(setup, 0)
    assert use.activations == 32 * block.kept
    assert use.logits + use.transients >= block.saved - block.kept + block.working


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["llama3-8b", "gpt3-175b", "mixtral-8x7b"]),
    pp=st.sampled_from([1, 4]),
    zero=st.sampled_from(STAGES),
)
def test_more_tensor_parallelism_never_adds_weights(name: str, pp: int, zero: ZeroStage) -> None:
    counts = memory(load_model(name))
    held = [counts.state(sharded(zero, tp=tp, pp=pp, dp=4), 0)[0][0] for tp in (1, 2, 4, 8)]
    assert held == sorted(held, reverse=True)


def test_experts_activations_do_not_depend_on_ep() -> None:
    """P2: at the same micro-batch, EP changes who holds experts, not how many tokens a rank computes."""
    counts = memory(load_model("qwen3-30b-a3b"))
    base = Setup(dp=8, sequence=4096, microbatches=2)
    uses = [counts.use(base._replace(ep=ep), 0) for ep in (1, 2, 8)]
    assert len({use.activations for use in uses}) == 1
    assert uses[0].state[0] > uses[1].state[0] > uses[2].state[0]


def test_experts_activations_scale_with_top_k_over_tp() -> None:
    """P2: top_k · moe_ffn / tp."""
    spec = load_model("mixtral-8x7b")
    counts = memory(spec)
    one, two = (counts.unit("moe", Setup(tp=tp, sequence=4096).cut, "none").saved for tp in (1, 2))
    assert spec.experts
    inner = 4096 * spec.experts.top_k * spec.experts.ffn * 2 * 3
    assert one - two >= inner / 2


def test_gradients_in_fp32_add_two_bytes_per_parameter() -> None:
    """P5: accumulating in fp32 instead of bf16 changes the gradients and nothing else."""
    spec, setup = load_model("llama3-8b"), Setup(dp=8)
    half = replace(SOFTWARE["megatron"], policy=replace(POLICIES["megatron"], gradients=2))
    wide, narrow = (memory(spec, s).state(setup, 0)[0] for s in (SOFTWARE["megatron"], half))
    assert wide[2] - narrow[2] == pytest.approx(2 * parameter_count(spec), rel=1e-6)
    assert (wide[0], wide[1], wide[3]) == (narrow[0], narrow[1], narrow[3])


# In flight


@pytest.mark.parametrize("m", [1, 2, 3, 5, 6, 7, 9, 10, 11, 16])
@pytest.mark.parametrize("pp", [2, 3, 4, 5, 6])
@pytest.mark.parametrize(
    ("name", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)],
)
def test_closed_forms_of_what_is_in_flight(name: str, virtual: int, pp: int, m: int) -> None:
    """Equal to the schedule's own count: 1F1B min(m, p − i), interleaved p·v + p − 1 on the first rank."""
    if name == "interleaved" and m % pp:
        return
    counted = in_flight(make_schedule(name, pp, m, virtual))
    assert most_in_flight(name, pp, m, virtual) == tuple((c.until_input, c.until_weight) for c in counted)
    if name == "interleaved" and m > pp:
        assert most_in_flight(name, pp, m, virtual)[0][0] == min(m * virtual, pp * virtual + pp - 1)


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipev"])
def test_zero_bubble_schedules_are_counted(name: str) -> None:
    """P29, P10: at most p stages' worth on every rank of zb-h1."""
    virtual, pp = (1 if name == "zb-h1" else 2), 4
    held = most_in_flight(name, pp, 16, virtual)
    assert len(held) == pp
    if name == "zb-h1":
        assert max(weight for _, weight in held) <= pp


def test_what_the_schedule_says_is_what_the_closed_form_says_for_equal_chunks() -> None:
    spec = replace(load_model("llama3-8b"), layers=32)
    counts = memory(spec)
    setup = Setup(pp=4, virtual=2, schedule="interleaved", microbatches=8, sequence=2048)
    for rank in (1, 2):
        assert counts.use(setup, rank, exact=True).activations == counts.use(setup, rank).activations


# Ledgers


def test_categories_and_meters() -> None:
    """P6, P30, P32, R84: allocated, reserved and device are three figures, in this order, and their gaps are named."""
    counts = memory(load_model("llama3-8b"))
    setup = Setup(tp=2, dp=4, sequence=8192, microbatches=2)
    use = counts.use(setup, 0)
    ledger = counts.ledger(setup, use)
    gaps = ledger["allocator"] + ledger["runtime"]
    assert ledger.total_bytes - gaps == pytest.approx(use.training_bytes + shipped()["memory.workspace_bytes"], abs=8)
    assert ledger["allocator"] > 0
    assert ledger.total_bytes == pytest.approx(counts.device_bytes(setup, use), abs=8)


def test_growing_segments_reserve_less() -> None:
    """P14: reserved is never below allocated, and expandable segments come closer."""
    spec, setup = load_model("llama3-8b"), Setup(dp=8, sequence=4096)
    plain, grown = (memory(spec, replace(ENGINE, expandable=flag)) for flag in (False, True))
    gaps = [m.ledger(setup, m.use(setup, 0))["allocator"] for m in (plain, grown)]
    assert gaps[0] > gaps[1] >= 0


def test_communicators_are_counted_one_by_one() -> None:
    """P13: the term is a number of groups times the bytes of one."""
    assert communicators(Setup()) == 0
    assert communicators(Setup(tp=8)) == 2
    assert communicators(Setup(tp=8, pp=4, dp=2)) == 2 + 1
    assert [pairs(Setup(pp=pp)) for pp in (1, 2, 4)] == [0, 2, 4]
    spec, big = load_model("llama3-8b"), Setup(tp=8, pp=4, dp=2)
    counts = memory(spec)
    ledger = counts.ledger(big, counts.use(big, 0))
    values = shipped()
    groups = 3 * values["memory.communicator_bytes"] + 4 * values["memory.pair_bytes"]
    assert ledger["runtime"] == round(values["memory.context_bytes"] + groups)
    assert communicators(big, own_groups=5) == 3 + 5
    assert communicators(Setup(), own_groups=5) == 0


def test_software_of_2022_loads_every_kernel_at_once() -> None:
    """1,573 MiB of an empty process on A100 (BigScience), where later ones take a third."""
    spec, values = load_model("llama3-8b"), shipped()
    names = ("megatron-deepspeed", "megatron")
    old, new = (memory(spec, SOFTWARE[name]).beside.runtime_bytes(Setup()) for name in names)
    assert old == values["memory.context_bytes_early"]
    assert new == values["memory.context_bytes"] < old / 2


def test_only_what_comes_and_goes_leaves_gaps() -> None:
    counts = memory(load_model("llama3-8b"))
    one, piped = Setup(), Setup(pp=4)
    assert counts.beside.reserved(one, 5e9, 0.0) == 5e9
    assert 1e9 < counts.beside.reserved(one, 0.0, 1e9) < counts.beside.reserved(piped, 0.0, 1e9)
    grown = memory(load_model("llama3-8b"), replace(ENGINE, expandable=True))
    less = grown.beside.reserved(one, 0.0, 1e9)
    assert less == grown.beside.reserved(piped, 0.0, 1e9) < counts.beside.reserved(one, 0.0, 1e9)


def test_temporaries_of_the_update_leave_no_gaps() -> None:
    """They are a few blocks as large as the shard; what training left reserved is still there."""
    spec = load_model("llama3-8b")
    counts = memory(spec, replace(SOFTWARE["megatron-deepspeed"], own_groups=0))
    setup = Setup(tp=8, sequence=2048, recompute="full", sequence_parallel=False)
    use = counts.use(setup, 0)
    assert use.moment == "optimizer"
    assert counts.reserved_bytes(setup, use) == counts.allocated_bytes(use)
    long = setup._replace(sequence=65536)
    busy = counts.use(long, 0)
    moving = busy.moving + shipped()["memory.workspace_bytes"]
    assert counts.reserved_bytes(long, busy) == counts.beside.reserved(long, sum(busy.state), moving)


def test_a_cut_vocabulary_makes_more_copies_in_dtensors_loss() -> None:
    """Sixteen bytes a logit at once where ten would do, and none more without tensor parallelism."""
    spec = load_model("llama3-8b")
    setup = Setup(sequence=8192, recompute="full")
    logits = {
        (loss, tp): memory(spec, replace(ENGINE, traced=False, kernels=Kernels(loss=loss)))
        .use(setup._replace(tp=tp, sequence_parallel=tp > 1), 0)
        .logits
        for loss in ("unfused", "dtensor", "in-place")
        for tp in (1, 8)
    }  # fmt: skip
    assert logits["dtensor", 1] == logits["unfused", 1]
    assert logits["dtensor", 8] - logits["unfused", 8] == 6 * 8192 * spec.vocab / 8
    assert logits["in-place", 1] < logits["unfused", 1] / 2


def test_eager_selective_recomputation_keeps_what_no_backward_needs() -> None:
    """TorchTitan, 8B: 67.0 GiB eager, 62.1 compiled; the outputs of the last products are 4 GiB."""
    spec, setup = load_model("llama3-8b"), Setup(micro_batch=2, sequence=8192, recompute="selective")
    eager, compiled = (memory(spec, SOFTWARE[name]).use(setup, 0).activations for name in ("fsdp2", "fsdp2-compiled"))
    assert eager - compiled == pytest.approx(32 * 2 * 8192 * spec.hidden * 2)


def test_logits_spike_on_the_last_stage_only() -> None:
    """P9, P16, R89: 8,192 × 151,936 logits keep 4 bytes and pass through 2; a chunked loss removes most of it."""
    spec = load_model("qwen3-8b")
    setup = Setup(pp=2, sequence=8192, microbatches=4)
    first, last = (memory(spec).use(setup, rank) for rank in (0, 1))
    elements = 8192 * 151936
    assert first.logits == 0
    assert last.logits == pytest.approx(elements * 6 + 2 * 2 * 8192 * spec.hidden, rel=1e-4)
    chunked = memory(spec, replace(ENGINE, traced=False, kernels=replace(ENGINE.kernels, loss="chunked")))
    assert chunked.use(setup, 1).logits < last.logits / 3


def test_the_ends_are_heavier_than_the_middle() -> None:
    """P9: embedding on the first, logits on the last stage."""
    counts = memory(load_model("qwen3-0.6b"))
    setup = Setup(pp=7, microbatches=14, sequence=4096)
    state = [sum(counts.state(setup, rank)[0]) for rank in range(7)]
    assert state[0] > 1.2 * state[3] < state[6]


def test_moments_that_may_peak_are_all_told() -> None:
    """R61: the optimizer's step and the making of the state are moments of their own."""
    counts = memory(load_model("llama3-8b"))
    peaks = dict(counts.use(Setup(dp=8, sequence=4096, recompute="full"), 0).peaks)
    assert set(peaks) == {"block", "reduce", "optimizer", "start"}
    state = sum(counts.state(Setup(dp=8), 0)[0])
    assert all(peak >= state for peak in peaks.values())
    tiny = counts.use(Setup(dp=2, sequence=16, recompute="full"), 0)
    assert tiny.moment == "optimizer"
    assert tiny.transients == pytest.approx(dict(tiny.peaks)["optimizer"] - sum(tiny.state))


def test_zero_3_holds_one_unit_and_not_the_stage() -> None:
    """R62: design.md's 405B example: 0.74 GiB of gathered weights and 1.48 of gradients, of 5.94 and 11.88."""
    spec = load_model("llama3-405b")
    counts = memory(spec)
    setup = sharded(3, tp=8, pp=16, dp=128, microbatches=16, sequence=8192, recompute="full")
    (bucket,) = counts.buckets(8, 1)["llama"]
    assert round(bucket.dense * 2 / 2**30, 2) == 0.74
    assert round(bucket.dense * 4 / 2**30, 2) == 1.48
    whole = counts.state(setup._replace(zero=1, gather_per_use=False, reduce_per_microbatch=False), 7)[0]
    assert [round(x / 2**30, 2) for x in (whole[0], whole[2])] == [5.94, 11.88]
    assert counts.state(setup, 7)[0][0] == 0
    peaks = dict(counts.use(setup, 7).peaks)
    assert peaks["block"] - sum(counts.state(setup, 7)[0]) > bucket.dense * 6


def test_zero_3_gathered_once_a_step_holds_the_stage() -> None:
    """Its weights are spared between steps only: the peak is that of ZeRO-2, which keeps them."""
    model = memory(load_model("llama3-8b"))
    per_use = Setup(dp=8, zero=3, gather_per_use=True, reduce_per_microbatch=True)
    per_step = per_use._replace(gather_per_use=False)
    two = per_step._replace(zero=2)
    peaks = [model.use(setup, 0).training_bytes for setup in (per_use, per_step, two)]
    whole = 2 * parameter_count(load_model("llama3-8b"))
    assert peaks[1] - peaks[0] > 0.9 * whole
    assert peaks[1] == pytest.approx(peaks[2], rel=0.02)


def test_zero_2_can_peak_above_zero_1() -> None:
    """Its bucket of unreduced gradients comes on top where the shards save little."""
    counts = memory(load_model("llama3-8b"))
    one, two = (counts.use(sharded(z, dp=2, sequence=512), 0) for z in (1, 2))
    block = counts.buckets(1, 1)["llama"][0].dense
    assert two.peaks[0][1] - sum(two.state) >= one.peaks[0][1] - sum(one.state) + 4 * block


def test_ranks_of_405b_are_what_prove_traces() -> None:
    """Law 2: GiB of rank 56, second step, by `trigrid prove examples/llama3-405b.toml --zero Z --parallel.prefetch 0
    --ranks 56`, which takes too long for a test."""
    counts = memory(load_model("llama3-405b"))
    for zero, gib in zip(STAGES, (57.208, 21.858, 13.055, 7.860), strict=True):
        setup = sharded(zero, tp=8, pp=16, dp=128, microbatches=16, sequence=8192, recompute="full")
        use = counts.use(setup, 7)
        assert use.training_bytes / 2**30 == pytest.approx(gib, rel=0.001)


def test_combinations_never_give_negative_bytes() -> None:
    counts = memory(load_model("mixtral-8x7b"))
    for zero, recompute, virtual in product(STAGES, ("none", "selective", "full"), (1, 2)):
        name = "interleaved" if virtual > 1 else "1f1b"
        setup = sharded(zero, pp=4, dp=4, virtual=virtual, schedule=name, recompute=recompute, microbatches=4)
        assert min(counts.ledger(setup, counts.use(setup, 0, exact=True)).bytes.values()) >= 0
