"""A model by its size alone."""

from __future__ import annotations

from trigrid.blueprint.decoder import parameter_count
from trigrid.errors import Problem, Refused
from trigrid.spec.model import ModelSpec

SMALLEST, LARGEST = 100_000_000, 100_000_000_000_000
HEAD, VOCAB, SMALL_VOCAB, CONTEXT, ASPECT = 128, 128_256, 32_000, 131_072, 128
RULE = (
    "a Llama of this size: heads of 128, 8 KV heads, FFN of 3.5 times the width, 128,256 entries in the vocabulary "
    "(32,000 below 3 billion parameters), an even number of layers; the width, a multiple of 1,024, is about 128 times "
    "that"
)
SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def read_size(text: str, key: str) -> float:
    """The number that "300B" or "1.5e12" is. Raises Refused for what is none, naming `key`."""
    plain = text.strip().lower().replace(",", "").replace("_", "")
    factor = SUFFIXES.get(plain[-1:], 1)
    try:
        value = float(plain[:-1] if factor > 1 else plain) * factor
    except ValueError:
        raise Refused([Problem(key, text, "a number is needed, such as 300B, 1.5T or 7e9")]) from None
    if not 0 < value < float("inf"):
        raise Refused([Problem(key, text, "must be above 0 and finite")])
    return value


def shape_of_size(parameters: float) -> ModelSpec:
    """The model of about `parameters` parameters by RULE. Raises Refused for what no such model has."""
    if not SMALLEST <= parameters <= LARGEST:
        nearest = "100M" if parameters < SMALLEST else "100T"
        reason = "a size from 100M to 100T is needed"
        raise Refused([Problem("params", f"{parameters:g}", reason, (nearest,))])
    grain = 1024 if parameters >= 3e9 else 256
    widths = range(grain, 512 * grain, grain)
    return min((_shape(hidden, parameters) for hidden in widths), key=lambda spec: _misfit(spec, parameters))


def _shape(hidden: int, parameters: float) -> ModelSpec:
    """The model of this width whose size is nearest to `parameters`."""
    ends = 2 * _vocab(parameters) * hidden + hidden
    heads, kv_heads = hidden // HEAD, min(8, hidden // HEAD)
    ffn = 7 * hidden // 2
    block = 2 * hidden * hidden + 2 * hidden * kv_heads * HEAD + 3 * hidden * ffn + 2 * hidden
    return ModelSpec(
        name=_name(parameters),
        hidden=hidden,
        layers=max(2, 2 * round((parameters - ends) / block / 2)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD,
        ffn=ffn,
        vocab=_vocab(parameters),
        context=CONTEXT,
    )


def _misfit(spec: ModelSpec, parameters: float) -> tuple[bool, float]:
    """First that the size is right within 3 %, then how far the proportions are from the usual ones."""
    aspect = spec.hidden / spec.layers / ASPECT
    size = abs(parameter_count(spec) / parameters - 1)
    return size > 0.03, max(aspect, 1 / aspect) + size


def _vocab(parameters: float) -> int:
    return VOCAB if parameters >= 3e9 else SMALL_VOCAB


def _name(parameters: float) -> str:
    for suffix, factor in reversed(SUFFIXES.items()):
        if parameters >= factor:
            return f"{parameters / factor:.4g}{suffix.upper()}"
    return f"{parameters:.4g}"
