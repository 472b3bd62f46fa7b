"""What units save and compute, against Korthikanti 2022 and the FLOPs counted from shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint.claims import claims
from trigrid.blueprint.decoder import block_kinds
from trigrid.blueprint.flops import forward_flops_per_token
from trigrid.blueprint.terms import Kernels, saved_bytes
from trigrid.spec.model import ModelSpec
from trigrid.spec.models import load_model

KORTHIKANTI = Kernels(fused_attention=False, dropout=True, regather=True)
GPT3 = replace(load_model("gpt3-175b"), context=2048)


def layer_bytes(spec: ModelSpec, kernels: Kernels, s: int, b: int, tp: int, sp: bool, selective: bool = False) -> float:
    tensors = claims(spec, spec.block, kernels).saved
    return saved_bytes(
        tensors, tokens=s * b, sequence=s, tp=tp, sequence_parallel=sp, compute_bytes=2, selective=selective
    )


@pytest.mark.parametrize(("s", "b"), [(2048, 1), (1024, 4)])
def test_a_gpt_layer_keeps_what_korthikanti_counts(s: int, b: int) -> None:
    """P12: s·b·h·(34 + 5·a·s/h) without parallelism (equation 1)."""
    h, a = GPT3.hidden, GPT3.heads
    assert layer_bytes(GPT3, KORTHIKANTI, s, b, 1, False) == 34 * s * b * h + 5 * a * s * s * b


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_and_sequence_parallelism_cut_what_korthikanti_says(t: int) -> None:
    """Equation 2: s·b·h·(10 + 24/t + 5·a·s/(h·t)); equation 4, with sequence parallelism: all of it over t;
    selective recomputation: 34·s·b·h/t, table 2."""
    h, a, s, b = GPT3.hidden, GPT3.heads, 2048, 1
    tensor = layer_bytes(GPT3, KORTHIKANTI, s, b, t, False)
    assert tensor == s * b * h * 10 + s * b * h * 24 / t + 5 * a * s * s * b / t
    assert layer_bytes(GPT3, KORTHIKANTI, s, b, t, True) == (34 * s * b * h + 5 * a * s * s * b) / t
    assert layer_bytes(GPT3, KORTHIKANTI, s, b, t, True, selective=True) == 34 * s * b * h / t


COUNTED = ["llama3-8b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"]


@pytest.mark.parametrize("spec", [GPT3, *map(load_model, COUNTED)], ids=lambda s: s.name)
def test_products_are_those_of_the_flops(spec: ModelSpec) -> None:
    """R86, P20: grouped queries, gate, head: 2 · into · out, and 2 · 2 · heads · dim · sequence of attention."""
    sequence, total = 4096, 0.0
    for kind, count in (("embedding", 1), *block_kinds(spec), ("head", 1)):
        unit = claims(spec, kind, Kernels())
        times = spec.experts.top_k if spec.experts else 1
        total += count * sum(2 * g.into * g.out * (times if g.routed else 1) for g in unit.gemms)
        total += count * sum(2 * a.heads * (a.qk_dim + a.v_dim) * sequence for a in unit.attends)
    assert total == forward_flops_per_token(spec, sequence, causal=False)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["llama3-8b", "gpt3-175b", "qwen3-8b"]), st.booleans(), st.booleans(), st.sampled_from([1, 2, 8])
)
def test_context_parallelism_divides_tokens(name: str, fused: bool, dropout: bool, tp: int) -> None:
    """P17: half of each of four sequences keeps what two whole ones do, if no score is kept."""
    spec, kernels = load_model(name), Kernels(fused_attention=True, dropout=dropout, regather=fused)
    tensors = claims(spec, spec.block, kernels).saved

    def kept(tokens: int) -> float:
        return saved_bytes(tensors, tokens=tokens, sequence=2048, tp=tp, sequence_parallel=True, compute_bytes=2)

    assert kept(4 * 2048 // 2) == kept(2 * 2048)


def test_alternate_selective_keeps_less_and_runs_products_again() -> None:
    spec, kernels = load_model("llama3-8b"), Kernels(selective="alternate", gate="fused")
    whole = layer_bytes(spec, kernels, 8192, 1, 1, False)
    assert layer_bytes(spec, kernels, 8192, 1, 1, False, selective=True) < 0.6 * whole
    assert {g.role for g in claims(spec, "llama", kernels).gemms if g.again} == {"k", "o", "up"}


def test_the_loss_keeps_one_softmax_in_fp32() -> None:
    """R89: 4 bytes for each logit of 151,936 at 8,192 tokens, 4.6 GiB, and nothing of it where the loss is chunked."""
    spec = load_model("qwen3-8b")
    whole, chunked = (claims(spec, "head", Kernels(loss=loss)).saved for loss in ("fused", "chunked"))

    def kept(tensors: tuple, tp: int) -> float:  # type: ignore[type-arg]
        return saved_bytes(tensors, tokens=8192, sequence=8192, tp=tp, sequence_parallel=False, compute_bytes=2)

    assert kept(whole, 1) - kept(chunked, 1) == 8192 * 151936 * 4
    assert round(8192 * 151936 * 4 / 2**30, 1) == 4.6
    assert kept(whole, 8) - kept(chunked, 8) == 8192 * 151936 * 4 / 8


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37)]
)
def test_active_parameters_are_the_published_ones(name: str, active: float) -> None:
    """R86: a token without attention scores costs two FLOPs per active parameter, but for the embedding's look-up."""
    spec = load_model(name)
    billions = forward_flops_per_token(spec, 0, causal=True) / 2 / 1e9 + spec.vocab * spec.hidden / 1e9
    assert billions == pytest.approx(active, rel=0.03)


def test_experts_save_what_their_tokens_need() -> None:
    """P2: top_k tokens' worth of the inner width, cut by TP, whatever the number of experts."""
    spec = load_model("mixtral-8x7b")
    kept = {t.name: t for t in claims(spec, "moe", Kernels()).saved}
    assert spec.experts
    for name in ("expert_gate", "expert_up", "expert_down_input"):
        assert (kept[name].elements, kept[name].cut) == (spec.experts.top_k * spec.experts.ffn, "tp")
    assert kept["dispatched"].elements == spec.experts.top_k * spec.hidden


def test_latent_attention_saves_its_narrow_vectors_uncut() -> None:
    spec = load_model("deepseek-v3")
    kept = {t.name: t for t in claims(spec, "moe", Kernels(regather=True)).saved}
    assert (kept["latents"].elements, kept["latents"].cut) == (2 * (1536 + 512), "sequence")
    assert kept["attention_output"].elements == 128 * 128
    assert kept["q"].elements == 128 * 192
