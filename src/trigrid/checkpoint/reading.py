"""Reading single boxes of a checkpoint, in one process, without holding more than the box."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trigrid.checkpoint.files import opened
from trigrid.checkpoint.folder import checkpoints
from trigrid.checkpoint.manifest import DTYPES, NAME, Damaged, Format, Kind, Manifest, read_job
from trigrid.checkpoint.parts import entry_name, key_of
from trigrid.checkpoint.restore import mismatches, verify
from trigrid.data.sets import load
from trigrid.errors import Problem, Refused
from trigrid.job import job_from_text
from trigrid.spec.job import Job


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest of a run's folder. Raises Refused where there is none."""
    if (path / NAME).is_file():
        return path
    if newest := checkpoints(path):
        return newest[0]
    reason = "is neither a checkpoint of trigrid, with a manifest.json, nor the folder of a run that has one"
    raise Refused([Problem("PATH", path, reason if path.exists() else "there is no such folder")])


def job_of(path: Path, manifest: Manifest) -> Job:
    """The job that wrote the checkpoint. Raises Damaged where its job.toml is another or cannot be read."""
    text = read_job(path, manifest)
    try:
        return job_from_text(text, folder=path)
    except Refused as refused:
        raise Damaged(f"{path / 'job.toml'}: is no job that this version of trigrid reads: {refused}") from None


def find_tokenizer(path: Path, job: Job) -> Path | None:
    """The file of the tokenizer that the checkpoint's run used, which may be gone; None where nothing says which."""
    record = path.absolute().parent.parent / "data.json"
    if path.absolute().parent.name == "checkpoints" and record.is_file():
        try:
            return load(record).tokenizer
        except (OSError, ValueError):
            raise Damaged(f"{record}: cannot be read; it says which tokenizer the run used") from None
    return None if job.data.tokenizer == "train" else Path(job.data.tokenizer).expanduser()


def faults_of(path: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest of the checkpoint `path`, where it can be read, and all that is wrong: in digests, shapes, names."""
    manifest, faults = verify(path)
    if manifest is None or faults:
        return manifest, faults
    try:
        return manifest, [*_unlike_headers(path, manifest), *_unlike_model(path, manifest)]
    except Damaged as damaged:
        return manifest, [str(damaged)]


def open_sound(path: Path) -> BoxReader:
    """A reader of the checkpoint `path`, every byte of which has been compared with its digest. Raises Damaged."""
    manifest, faults = faults_of(path)
    if manifest is None or faults:
        raise Damaged("\n".join(faults))
    return BoxReader(path, manifest)


class BoxReader:
    """Boxes of the tensors of a checkpoint, from whatever parts they are made of.

    Each read opens its files again: what of a file has been read would else count as this process's memory.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    def format(self, name: str, kind: Kind) -> Format:
        return self.manifest.tensors[name].kinds[kind].dtype

    def read(self, name: str, kind: Kind, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The box of parameter `name` from `offsets` on, in the format it is stored in."""
        stored = self.manifest.tensors[name].kinds[kind]
        values = torch.empty(tuple(sizes), dtype=DTYPES[stored.dtype])
        for number, at, lengths in stored.parts:
            starts = [max(a, b) for a, b in zip(at, offsets, strict=True)]
            stops = [min(a + n, b + m) for a, n, b, m in zip(at, lengths, offsets, sizes, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            with opened(self.folder / self.manifest.files[number].name) as file:
                box = file.get_slice(entry_name(key_of(name, kind), at))[_slices(starts, stops, at)]
                values[_slices(starts, stops, offsets)] = box
        return values

    def whole(self, name: str) -> Tensor:
        """All of a weight."""
        shape = self.manifest.tensors[name].shape
        return self.read(name, "weight", (0,) * len(shape), shape)


def _slices(starts: Sequence[int], stops: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - at, b - at) for a, b, at in zip(starts, stops, origin, strict=True))


def _unlike_headers(path: Path, manifest: Manifest) -> list[str]:
    """Parts whose shape or format in their file is another than the manifest says."""
    by_file: dict[int, list[tuple[str, tuple[int, ...], Format]]] = {}
    for name, kind, _, stored in manifest.stored():
        for number, offsets, sizes in stored.parts:
            by_file.setdefault(number, []).append((entry_name(key_of(name, kind), offsets), sizes, stored.dtype))
    faults = []
    for number, expected in sorted(by_file.items()):
        where = path / manifest.files[number].name
        with opened(where) as file:
            names = set(file.keys())
            for entry, sizes, dtype in expected:
                if entry not in names:
                    faults.append(f"{where}: lacks {entry}")
                    continue
                held = file.get_slice(entry)
                if (tuple(held.get_shape()), held.get_dtype()) != (sizes, dtype):
                    found = f"{held.get_dtype()} {held.get_shape()}"
                    faults.append(f"{where}: {entry} is {found}, and the manifest says {dtype} {list(sizes)}")
    return faults


def _unlike_model(path: Path, manifest: Manifest) -> list[str]:
    return [f"{path}: {wrong}" for wrong in mismatches(job_of(path, manifest).model, manifest)]
