"""Models of transformers with random weights, in fp32 and in true fp64, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trigrid.models.huggingface import places
from trigrid.spec.huggingface import model_from_config
from trigrid.spec.model import ModelSpec

Precision = Literal["fp32", "fp64"]


class Fp64Throughout(TorchFunctionMode):
    """Wherever code asks for fp32, it gets fp64.

    A transformers model that was cast to fp64 still computes in fp32 its RMS norms, its rotary frequencies and angles,
    the softmax of its eager attention, and its loss. Each of these alone would bound a comparison near 1e-7.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_wider, args), **{key: _wider(value) for key, value in (kwargs or {}).items()})


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def arithmetic(precision: Precision) -> AbstractContextManager[object]:
    """Makes transformers compute in `precision` everywhere."""
    return Fp64Throughout() if precision == "fp64" else nullcontext()


@dataclass(frozen=True)
class Reference:
    """A model of transformers with `spec`, which trigrid read from the file that transformers wrote for it."""

    model: PreTrainedModel
    spec: ModelSpec
    precision: Precision

    @classmethod
    def make(cls, config: PretrainedConfig, precision: Precision, folder: Path) -> Reference:
        """Random weights, none left at 1 or 0. Attention is eager: written out, where trigrid calls a fused kernel."""
        with torch.random.fork_rng(), arithmetic(precision):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.3 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        if precision == "fp64":
            model.double()
        return cls(model, model_from_config(folder), precision)

    def values(self) -> dict[str, Tensor]:
        """Copies of the weights, by trigrid's names."""
        return self._parts({name: p.detach() for name, p in self.model.named_parameters()})

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients, by trigrid's names."""
        return self._parts({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})

    def _parts(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, place in places(self.spec).items():
            part = named[place.tensor][tuple(slice(*ends) for ends in place.box)]
            found[name] = (part.t() if place.transposed else part).clone()
        return found

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [rows, sequence] → [rows, sequence, vocabulary]."""
        with torch.no_grad(), arithmetic(self.precision):
            logits: Tensor = self.model(input_ids=tokens).logits
            return logits

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Sum of the cross-entropies ÷ number of valid labels. tokens and labels [rows, sequence], in one pass."""
        with arithmetic(self.precision):
            valid = int((labels != -100).sum())
            # The labels are the next tokens already; `labels` only switches the loss on.
            output = self.model(input_ids=tokens, labels=labels, shift_labels=labels, num_items_in_batch=valid)
            loss: Tensor = output.loss
            return loss
