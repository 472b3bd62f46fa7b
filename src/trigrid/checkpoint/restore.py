"""Reading a checkpoint into an engine of any layout, after it was found sound and of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as read

from trigrid.blueprint import decoder
from trigrid.checkpoint.folder import checkpoints
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
from trigrid.checkpoint.parts import parts_held
from trigrid.checkpoint.storage import FolderReader, PartsLoader
from trigrid.engine.comm import Comm
from trigrid.engine.runtime import Engine
from trigrid.spec.model import ModelSpec

MOMENTS: tuple[Kind, Kind] = ("mean", "square")


@dataclass(frozen=True)
class Found:
    """A checkpoint that is sound: its folder, its manifest and the text of its job."""

    path: Path
    manifest: Manifest
    job_text: str


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
        job_text = read_job(path, manifest)
    except Damaged as damaged:
        return None, [str(damaged)]
    faults = [f"{path / name}: is not among the files of this checkpoint" for name in strangers(path, manifest)]
    faults += filter(None, (check_file(path, file) for file in manifest.files[index::among]))
    return Found(path, manifest, job_text), faults


def candidates(path: Path) -> list[Path]:
    """Checkpoints that `path` may mean, newest first: those of a run's folder, or itself."""
    return checkpoints(path) if (path / "checkpoints").is_dir() else [path]


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
    """Set weights and moments of `engine` to those of a checkpoint, which `find_sound` has found, and return where the
    run stood. Where it has weights alone, as an imported one, the moments become zero. All ranks must call it.

    Raises Damaged where it is of another model, or keeps its moments in another format.
    """
    manifest = found.manifest
    if wrong := list(mismatches(engine.job.model, manifest)):
        raise Damaged(f"{found.path}: is of another model than the job's: {'; '.join(wrong[:4])}")
    parts = parts_held(engine)
    trained_before = any(kind in MOMENTS for _, kind, _, _ in manifest.stored())
    for part in parts:
        stored = manifest.tensors[part.name].kinds.get(part.kind)
        if stored is None and trained_before:
            reason = f"has no {part.kind} of {part.name}, which optimizer.frozen kept then and lets go now"
            raise Damaged(f"{found.path}: {reason}")
        if stored is not None and trained_before and DTYPES[stored.dtype] != part.values.dtype:
            mine = f"run.precision = {engine.job.run.precision} keeps it in {part.values.dtype}"
            raise Damaged(f"{found.path}: stores {part.kind} of {part.name} in {stored.dtype}, and {mine}")
    if not trained_before:
        for part in parts:
            if part.kind in MOMENTS:
                part.values.zero_()
        parts = [part for part in parts if part.kind == "weight"]
    read(
        {},
        storage_reader=FolderReader(found.path, manifest),
        planner=PartsLoader(parts),
        process_group=group,
        no_dist=group is None,
    )
    engine.resume(manifest.state.updates)
    return manifest.state
