"""Exporting a checkpoint of any layout: `config.json` and safetensors files that transformers reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trigrid.checkpoint.files import FileWriter, Header
from trigrid.checkpoint.from_huggingface import INDEX, SINGLE
from trigrid.checkpoint.manifest import DTYPES, Format
from trigrid.checkpoint.reading import BoxReader, job_of
from trigrid.checkpoint.writing import PIECE_BYTES, Progress, bands, check_new, made_aside
from trigrid.data.tokenizer import load_tokenizer
from trigrid.models.huggingface import Place, tensors, turned_back
from trigrid.spec.model import ModelSpec
from trigrid.spec.to_huggingface import config_of_model

ExportDtype = Literal["bf16", "fp16", "fp32", "fp64"]
FORMAT_OF: dict[ExportDtype, Format] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Exported:
    """files: of weights. tokenizer: the files that say how text becomes tokens; none where it is not known."""

    files: tuple[str, ...]
    bytes: int
    dtype: ExportDtype
    tokenizer: tuple[str, ...]


def export_folder(
    reader: BoxReader,
    dst: Path,
    progress: Progress,
    *,
    dtype: ExportDtype | None = None,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> Exported:
    """Make the folder `dst` of the weights that `reader` reads, for transformers.

    dtype: of the weights; left out: that in which the run computed. tokenizer: a file that load_tokenizer reads. A file
    of weights holds `shard_bytes` at most, but for a tensor that has more. No more than a piece of a tensor is in
    memory, of GPT-2, whose matrices lie the other way round, a whole one.
    Raises Refused where transformers has no such model, `dst` is there already or there is no room.
    """
    job = job_of(reader.folder, reader.manifest)
    spec, chosen = job.model, dtype or job.run.precision
    places = tensors(spec)
    headers = [Header(name, FORMAT_OF[chosen], next(iter(held.values())).shape) for name, held in places.items()]
    shards = list(_sharded(headers, shard_bytes))
    total = sum(header.bytes for header in headers)
    separator = load_tokenizer(tokenizer, 1).separator if tokenizer else None
    torch_dtype = str(DTYPES[FORMAT_OF[chosen]]).removeprefix("torch.")
    config = config_of_model(spec, torch_dtype, separator)
    check_new(dst, total)
    with made_aside(dst) as folder:
        where: dict[str, str] = {}
        done = 0
        for number, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with FileWriter(folder / name, shard, {"format": "pt"}) as file:
                for header in shard:
                    where[header.name] = name
                    for values in _pieces(header, places[header.name], reader, piece_bytes):
                        file.write(values)
                        done += values.nbytes
                        progress("writing (MB)", done // 1_000_000, total // 1_000_000)
                file.end()
        if len(shards) > 1:
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(folder / "config.json", config)
        ends = {"bos_token_id": separator, "eos_token_id": separator, "_from_model_config": True}
        _write_json(folder / "generation_config.json", ends)
        kept = _write_tokenizer(folder, tokenizer, spec) if tokenizer else ()
        os.rename(folder, dst)
    return Exported(tuple(dict.fromkeys(where.values())), total, chosen, kept)


def _sharded(headers: Sequence[Header], shard_bytes: int) -> Iterator[list[Header]]:
    shard: list[Header] = []
    for header in headers:
        if shard and sum(held.bytes for held in shard) + header.bytes > shard_bytes:
            yield shard
            shard = []
        shard.append(header)
    yield shard


def _pieces(header: Header, inside: dict[str, Place], reader: BoxReader, piece_bytes: int) -> Iterator[Tensor]:
    """The tensor from its first to its last row, put together from the parameters in it."""
    others = tuple((0, size) for size in header.shape[1:])
    if any(place.transposed for place in inside.values()):
        # Rows of it are columns of a parameter, which would be read again for each piece.
        piece_bytes = header.bytes
    for rows in bands(header.shape, DTYPES[header.dtype].itemsize, piece_bytes):
        box = (rows, *others)
        values = torch.empty([stop - start for start, stop in box], dtype=DTYPES[header.dtype])
        for name, place in inside.items():
            own = turned_back(box, place)
            if own is None:
                continue
            part = reader.read(name, "weight", [start for start, _ in own], [stop - start for start, stop in own])
            target = values
            for dim, ((start, stop), (a, b)) in enumerate(zip(place.box, box, strict=True)):
                first, last = max(start, a), min(stop, b)
                target = target.narrow(dim, first - a, last - first)
            target.copy_(part.t() if place.transposed else part)
        yield values


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path, tokenizer: Path, spec: ModelSpec) -> tuple[str, ...]:
    """Copy the tokenizer; where it is a JSON file of `tokenizers`, transformers can load it from there."""
    name = "tokenizer.json" if _is_json(tokenizer) else "tokenizer.model"
    shutil.copyfile(tokenizer, folder / name)
    if name == "tokenizer.model":
        return (name,)
    loaded = load_tokenizer(tokenizer, 1)
    separator = loaded.decode([loaded.separator])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": separator,
        "eos_token": separator,
        "model_max_length": spec.context,
    }
    _write_json(folder / "tokenizer_config.json", config)
    return name, "tokenizer_config.json"


def _is_json(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"{")
