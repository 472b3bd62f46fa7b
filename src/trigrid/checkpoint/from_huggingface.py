"""Importing a Hugging Face folder: `config.json` and safetensors files become a checkpoint with weights alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trigrid.blueprint import decoder
from trigrid.checkpoint.files import opened
from trigrid.checkpoint.manifest import DTYPES, Damaged, Format, Kind, State
from trigrid.checkpoint.writing import PIECE_BYTES, Planned, Progress, bands, write_checkpoint
from trigrid.errors import Problem, Refused
from trigrid.job import dump_job
from trigrid.models.huggingface import known_as, places, tensors, turned
from trigrid.spec.huggingface import model_from_config
from trigrid.spec.job import Batch, Data, Job, Run
from trigrid.spec.model import ModelSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
FILE_BYTES = 4 << 30
"""A file of the checkpoint holds about so much."""


def is_huggingface(path: Path) -> bool:
    """Whether `path` is a folder as transformers leaves it."""
    return (path / "config.json").is_file()


def import_folder(
    src: Path, dst: Path, progress: Progress, piece_bytes: int = PIECE_BYTES, file_bytes: int = FILE_BYTES
) -> Job:
    """Make the checkpoint `dst` of the model in the folder `src`, and return the job that is written to it.

    Weights are kept in fp32, which holds every fp16 and bf16 number; fp64 stays. No more than a piece of a tensor is in
    memory, of GPT-2, whose matrices lie the other way round, a whole one.
    Raises Refused for what is missing, too much or of another shape, Damaged where a file cannot be read.
    """
    spec = model_from_config(src)
    source = HuggingFaceSource(src, spec)
    parameters = decoder(spec).parameters
    files: dict[int, list[Planned]] = {0: []}
    held = 0
    for name, parameter in parameters.items():
        size = parameter.numel * DTYPES[source.format(name, "weight")].itemsize
        if files[len(files) - 1] and held + size > file_bytes:
            files[len(files)], held = [], 0
        held += size
        files[len(files) - 1].append(Planned(name, "weight", (0,) * len(parameter.shape), parameter.shape))
    job = _job_of(spec, src)
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    source.check_tied(progress, piece_bytes)
    write_checkpoint(dst, files, shapes, source, State(), dump_job(job), progress, piece_bytes)
    return job


@dataclass(frozen=True)
class _Held:
    """A tensor of a file: its name there, shape and number format."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class HuggingFaceSource:
    """The weights of a Hugging Face folder by trigrid's names, in fp32 (fp64 where they are)."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._folder, self._spec = folder, spec
        self._places = places(spec)
        self._held = _inventory(folder, spec)
        self._check()

    def format(self, name: str, kind: Kind) -> Format:
        return "F64" if self._held[self._places[name].tensor].dtype == "F64" else "F32"

    def read(self, name: str, kind: Kind, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        place = self._places[name]
        box = turned(tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True)), place)
        values = _read(self._held[place.tensor], box).to(DTYPES[self.format(name, kind)])
        return values.t() if place.transposed else values

    def check_tied(self, progress: Progress, piece_bytes: int) -> None:
        """Raise Refused where a model whose head is its embedding comes with another head."""
        head = self._held.get("lm_head.weight")
        if not self._spec.tied or head is None:
            return
        embedding = self._held[self._places["embedding.weight"].tensor]
        for start, stop in bands(head.shape, 8, piece_bytes):
            box = ((start, stop), (0, head.shape[1]))
            if not torch.equal(_read(head, box), _read(embedding, box)):
                reason = "tie_word_embeddings is true in config.json, and it differs from the embedding"
                raise Refused([Problem("lm_head.weight", f"rows {start} to {stop}", reason, where=str(head.file))])
            progress("comparing the head with the embedding (rows)", stop, head.shape[0])

    def _check(self) -> None:
        """Raise Refused, for all tensors at once, for what is missing, too much, or of another shape or format."""
        problems = []
        wanted = {name: next(iter(inside.values())).shape for name, inside in tensors(self._spec).items()}
        for name, shape in wanted.items():
            held = self._held.get(name)
            if held is None:
                problems.append(Problem(name, "(not given)", f"is missing; config.json asks for {list(shape)}"))
            elif held.shape != shape:
                reason = f"config.json asks for {list(shape)}"
                problems.append(Problem(held.name, list(held.shape), reason, where=str(held.file)))
            elif held.dtype not in DTYPES:
                reason = "this number format is not read"
                problems.append(Problem(held.name, held.dtype, reason, tuple(DTYPES), str(held.file)))
        if self._spec.tied and "lm_head.weight" in self._held:
            wanted["lm_head.weight"] = wanted[self._places["embedding.weight"].tensor]
            if self._held["lm_head.weight"].shape != wanted["lm_head.weight"]:
                del wanted["lm_head.weight"]
        for name, held in self._held.items():
            if name not in wanted:
                reason = "the model of config.json has no such tensor"
                problems.append(Problem(held.name, list(held.shape), reason, where=str(held.file)))
        if problems:
            raise Refused(problems)


def _read(held: _Held, box: Sequence[tuple[int, int]]) -> Tensor:
    with opened(held.file) as file:
        # A copy: a view would keep the file in this process's memory.
        values: Tensor = file.get_slice(held.name)[tuple(slice(*ends) for ends in box)].clone()
    return values


def _inventory(folder: Path, spec: ModelSpec) -> dict[str, _Held]:
    """The tensors of the folder's files, by the names that transformers' model has for them."""
    found: dict[str, _Held] = {}
    for path, promised in _files(folder):
        with opened(path) as file:
            names = list(file.keys())
            if missing := sorted(promised - set(names)):
                reason = f"{INDEX} says that it holds {missing[0]}"
                raise Refused([Problem("tensor file", path, reason)])
            for known, name in known_as(names, spec).items():
                if known in found:
                    raise Refused([Problem(name, str(path), f"is also in {found[known].file}")])
                held: Any = file.get_slice(name)
                found[known] = _Held(path, name, tuple(held.get_shape()), held.get_dtype())
    return found


def _files(folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """Each safetensors file of the folder, with the tensors that the index promises of it."""
    if (folder / INDEX).is_file():
        by_file: dict[str, set[str]] = {}
        for tensor, name in _weight_map(folder / INDEX).items():
            by_file.setdefault(name, set()).add(tensor)
        for name, promised in sorted(by_file.items()):
            yield folder / name, promised
    elif (folder / SINGLE).is_file():
        yield folder / SINGLE, set()
    else:
        raise Refused([_without_files(folder)])


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor → file, of an index whose files lie beside it."""
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        entries = dict(found.items())
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{path}: is no index: it has no weight_map") from None
    for tensor, name in entries.items():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            reason = "must be the plain name of a .safetensors file beside the index"
            raise Refused([Problem(f"weight_map.{tensor}", name, reason, where=str(path))])
        if not (path.parent / name).is_file():
            raise Refused([Problem(f"weight_map.{tensor}", name, "there is no such file", where=str(path))])
    return entries


def _without_files(folder: Path) -> Problem:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        reason = "is a pickle, which can run code when it is read; save the model as safetensors"
        return Problem("tensor file", folder / pickles[0], reason, (SINGLE, INDEX))
    return Problem("SRC", folder, f"has neither {SINGLE} nor {INDEX}")


def _job_of(spec: ModelSpec, folder: Path) -> Job:
    """A job that says which model it is and with which tokenizer; a training resumes from it with a job of its own."""
    tokenizer = next((folder / name for name in TOKENIZERS if (folder / name).is_file()), None)
    return Job(
        model=spec,
        batch=Batch(global_batch=1, sequence=spec.context),
        run=Run(steps=1),
        data=Data(tokenizer=str(tokenizer.resolve())) if tokenizer else Data(),
    )
