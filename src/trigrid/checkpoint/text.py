"""Text from a checkpoint: its weights in one process, its run's tokenizer, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigrid.checkpoint.reading import BoxReader, job_of
from trigrid.checkpoint.writing import Progress
from trigrid.data.tokenizer import Tokenizer
from trigrid.engine.zero import TORCH_DTYPE
from trigrid.models.generate import LanguageModel
from trigrid.spec.precision import PRECISIONS

UNFINISHED = "\ufffd"
"""What a tokenizer shows of a character whose last bytes are yet to come."""


def load_model(reader: BoxReader, device: torch.device, progress: Progress) -> LanguageModel:
    """The model of a checkpoint of any layout: on a GPU in the format its run computed in, on the CPU in fp32."""
    job = job_of(reader.folder, reader.manifest)
    dtype = torch.float32 if device.type == "cpu" else TORCH_DTYPE[PRECISIONS[job.run.precision].compute]
    values = {}
    names = reader.manifest.tensors
    for number, name in enumerate(names, start=1):
        values[name] = reader.whole(name).to(device, dtype)
        progress("reading weights (tensors)", number, len(names))
    return LanguageModel(job.model, values)


class GrowingText:
    """The text of `prompt` and of tokens that come one by one."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._shown = len(tokenizer.decode(self._ids))

    def add(self, token: int) -> str:
        """What there is to show after `token` that was not there before; nothing in the middle of a character."""
        self._ids.append(token)
        return self._more(whole=True)

    def end(self) -> str:
        """What is left to show, half characters too."""
        return self._more(whole=False)

    def _more(self, whole: bool) -> str:
        text = self._tokenizer.decode(self._ids)
        if whole and text.endswith(UNFINISHED):
            return ""
        new, self._shown = text[self._shown :], len(text)
        return new
