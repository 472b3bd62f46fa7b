"""What units save and compute, against Korthikanti 2022 and the FLOPs counted from shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trigrid.blueprint.claims import Kernels, claims, saved_bytes
from trigrid.blueprint.flops import forward_flops_per_token
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


@pytest.mark.parametrize("spec", [GPT3, load_model("llama3-8b"), load_model("qwen3-8b")], ids=lambda s: s.name)
def test_products_are_those_of_the_flops(spec: ModelSpec) -> None:
    """R86, P20: grouped queries, gate, head: 2 · into · out, and 2 · 2 · heads · dim · sequence of attention."""
    sequence, total = 4096, 0.0
    for kind, count in (("embedding", 1), (spec.block, spec.layers), ("head", 1)):
        unit = claims(spec, kind, Kernels())
        total += count * sum(2 * g.into * g.out for g in unit.gemms)
        total += count * sum(2 * a.heads * (a.qk_dim + a.v_dim) * sequence for a in unit.attends)
    assert total == forward_flops_per_token(spec, sequence, causal=False)


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
