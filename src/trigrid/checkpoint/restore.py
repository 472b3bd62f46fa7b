"""Reading a checkpoint into an engine of any layout, after it was found sound and of the same model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read

from trigrid.blueprint import decoder
from trigrid.checkpoint.manifest import (
    DTYPES,
    Damaged,
    Kind,
    Manifest,
    State,
    check_file,
    read_job,
    read_manifest,
    strangers,
)
from trigrid.checkpoint.parts import Part, parts_held
from trigrid.checkpoint.planners import PartsLoader
from trigrid.checkpoint.storage import FolderReader, among, reasons
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.errors import Problem, Refused, RunFailed
from trigrid.spec.model import ModelSpec

MOMENTS: tuple[Kind, Kind] = ("mean", "square")


@dataclass(frozen=True)
class Found:
    """A checkpoint that is sound."""

    path: Path
    manifest: Manifest


def find_sound(comm: Comm, candidates: list[Path]) -> tuple[Found | None, list[str]]:
    """The first of `candidates` that is complete and undamaged, and what is wrong with those before it; the same on all
    ranks, each of which reads its share of the files. `candidates` count on the first rank alone."""
    faults: list[str] = []
    (shared, *_) = comm.gather_objects(candidates)
    for path in shared:  # type: ignore[attr-defined]
        found, wrong = _look(path, comm.rank, comm.grid.world)
        told = [fault for faults_of_rank in comm.gather_objects(wrong) for fault in faults_of_rank]  # type: ignore[attr-defined]
        if found is not None and not told:
            return found, faults
        # Every rank finds the same manifest at fault.
        faults += dict.fromkeys(told)
    return None, faults


def verify(path: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest of the checkpoint `path`, where it can be read, and everything that is wrong with it."""
    found, faults = _look(path, 0, 1)
    return (found.manifest if found else None), faults


def _look(path: Path, index: int, among: int) -> tuple[Found | None, list[str]]:
    """What is there, and the faults of file number `index` of every `among`."""
    try:
        manifest = read_manifest(path)
        read_job(path, manifest)
        others = strangers(path, manifest)
    except Damaged as damaged:
        return None, [str(damaged)]
    except OSError as error:
        return None, [f"{path}: cannot be read: {error.strerror}"]
    faults = [f"{path / name}: is not among the files of this checkpoint" for name in others]
    faults += filter(None, (check_file(path, file) for file in manifest.files[index::among]))
    return Found(path, manifest), faults


def mismatches(model: ModelSpec, manifest: Manifest) -> Iterator[str]:
    """In what the parameters of a checkpoint differ from those of `model`."""
    wanted = decoder(model).parameters
    for name, parameter in wanted.items():
        stored = manifest.tensors.get(name)
        if stored is None:
            yield f"{name} is missing"
        elif stored.shape != parameter.shape:
            yield f"{name} has shape {list(stored.shape)}, and the model needs {list(parameter.shape)}"
    for name in manifest.tensors.keys() - wanted.keys():
        yield f"{name} is no parameter of the model"


def load(engine: Engine, found: Found, group: dist.ProcessGroup | None) -> State:
    """Set weights and moments of `engine` to those of a checkpoint of its model, which `find_sound` has found, and
    return where the run stood. Where it has weights alone, as an imported one, the moments become zero. All ranks must
    call it.

    Raises Refused where it keeps them in another format, or lacks some; RunFailed where its files cannot be read.
    """
    manifest = found.manifest
    parts = parts_held(engine)
    if manifest.trained:
        _check_formats(engine, found, parts)
    else:
        for part in parts:
            if part.kind in MOMENTS:
                part.values.zero_()
        parts = [part for part in parts if part.kind == "weight"]
    try:
        with among(group):
            read({}, storage_reader=FolderReader(found.path, manifest), planner=PartsLoader(parts), process_group=group)
    except CheckpointException as caught:
        raise RunFailed(f"{found.path} cannot be read: {reasons(caught)}") from None
    engine.resume(manifest.state.updates)
    return manifest.state


def _check_formats(engine: Engine, found: Found, parts: Sequence[Part]) -> None:
    buckets = engine.buckets.values()
    frozen = {e.local.parameter.name for bucket in buckets if bucket.frozen for e in bucket.layout.entries}
    for part in parts:
        stored = found.manifest.tensors[part.name].kinds.get(part.kind)
        if stored is None:
            reason = f"{found.path} has no {part.kind} of {part.name}, which was frozen then and is trained now"
            raise Refused([Problem("optimizer.frozen", list(engine.job.optimizer.frozen), reason)])
        # What is frozen needs no more than the format it computes in.
        if DTYPES[stored.dtype] != part.values.dtype and part.name not in frozen:
            reason = f"keeps {part.kind} of {part.name} in {part.values.dtype}, and {found.path} in {stored.dtype}"
            raise Refused([Problem("run.precision", engine.job.run.precision, reason)])
