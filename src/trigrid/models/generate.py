"""Text from a model in one process: the training's own functions of the units, without a loss.

Nothing is kept between two tokens: each is computed from the whole text so far, as far as the model's context reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trigrid.blueprint import Unit, decoder
from trigrid.blueprint.parameters import localise
from trigrid.engine.comm import Comm
from trigrid.engine.tensor import TensorParallel
from trigrid.engine.units import Microbatch, UnitFunction
from trigrid.grid import Grid
from trigrid.models.decoder import Decoder
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec

COLDEST = 1e-30
"""Below, logits divided by the temperature are beyond all numbers, and the likeliest token is all there is."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    temperature: divides the logits; 0 takes the likeliest token. top_k: only so many likeliest tokens are drawn from;
    0: all. seed: of the draws.
    """

    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0


class LanguageModel:
    """A decoder that computes logits. values: its weights by name, all of one number format and on one device."""

    def __init__(self, spec: ModelSpec, values: Mapping[str, Tensor]):
        self.spec = spec
        self._device = values["embedding.weight"].device
        self._dtype = values["embedding.weight"].dtype
        layout = Layout()
        tp = TensorParallel(Comm(Grid(layout), 0), sequence_parallel=False)
        self._decoder = Decoder(spec, tp, self._dtype, self._device)
        *before, head = decoder(spec).units

        def weights(unit: Unit) -> dict[str, Tensor]:
            return {p.role: values[p.name] for p in unit.parameters}

        def function(unit: Unit) -> UnitFunction:
            return self._decoder.function(unit, {p.role: localise(p, layout, 0) for p in unit.parameters})

        self._units = [(function(unit), weights(unit)) for unit in before]
        self._head = weights(head)

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor, last: bool = False) -> Tensor:
        """Logits of each place, or of the `last` alone, [rows, places, vocabulary]."""
        tokens_SB = tokens_BS.t().contiguous().to(self._device)
        # A head without a loss asks for neither labels nor scale.
        microbatch = Microbatch(tokens_SB, tokens_SB.new_empty(0), torch.ones((), device=self._device))
        x: Tensor = tokens_SB
        for function, weights in self._units:
            x = function(weights, x, microbatch)
        return self._decoder.logits(self._head, x[-1:] if last else x).transpose(0, 1)


def generate(model: LanguageModel, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Tokens after those of `prompt`, of which there must be one, without end.

    Beyond the model's context only the last tokens of the text count, numbered from 0.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    text = list(prompt)
    while True:
        window = torch.tensor([text[-model.spec.context :]])
        token = _choose(model.logits(window, last=True)[0, -1].float().cpu(), sampling, generator)
        text.append(token)
        yield token


def _choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature < COLDEST:
        return int(logits_V.argmax())
    kept = logits_V.topk(min(sampling.top_k, len(logits_V)) if sampling.top_k else len(logits_V))
    # In fp64: a low temperature makes numbers that fp32 does not hold.
    probs = (kept.values.double() / sampling.temperature).softmax(-1)
    return int(kept.indices[torch.multinomial(probs, 1, generator=generator)])
