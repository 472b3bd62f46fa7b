"""A checkpoint written again, as the ranks of another layout would have written it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trigrid.blueprint.boxes import written
from trigrid.blueprint.buckets import BucketLayout, job_buckets
from trigrid.checkpoint.manifest import read_job
from trigrid.checkpoint.reading import BoxReader
from trigrid.checkpoint.writing import PIECE_BYTES, Planned, Progress, write_checkpoint
from trigrid.errors import Problem, Refused
from trigrid.grid import Grid, grid_of
from trigrid.job import dump_job, job_from_text
from trigrid.spec.job import Job

OF_LAYOUT = ("parallel", "cluster", "batch")
"""Sections of a job that another layout may change: data parallelism divides the batch."""


def reshard(
    reader: BoxReader, dst: Path, overrides: Sequence[str], progress: Progress, piece_bytes: int = PIECE_BYTES
) -> Job:
    """Make the checkpoint `dst` of all that `reader` reads, with the files of the job's layout after `overrides`, and
    return that job. Every number stays as it is, bit for bit; no more than a piece of a tensor is in memory.

    Raises Refused where an override is wrong or changes more than the layout, `dst` is there or there is no room.
    """
    manifest = reader.manifest
    text = read_job(reader.folder, manifest)
    before = job_from_text(text, folder=reader.folder)
    job = job_from_text(text, overrides, reader.folder)
    _check_layout_alone(before, job)
    grid = grid_of(job)
    stages: dict[tuple[int, int], dict[str, BucketLayout]] = {}
    files: dict[int, list[Planned]] = {}
    for rank in range(grid.world):
        coord = grid.coord(rank)
        if (coord.pp, coord.tp) not in stages:
            stages[coord.pp, coord.tp], _ = job_buckets(job, coord.pp, coord.tp)
        files[rank] = _planned(stages[coord.pp, coord.tp], grid, rank, reader)
    shapes = {name: parameter.shape for name, parameter in manifest.tensors.items()}
    write_checkpoint(dst, files, shapes, reader, manifest.state, dump_job(job), progress, piece_bytes)
    return job


def _planned(buckets: dict[str, BucketLayout], grid: Grid, rank: int, reader: BoxReader) -> list[Planned]:
    """What `rank` writes."""
    shard, replicas = grid.group("zero", rank).index(rank), grid.group("replicate", rank)
    kinds = {name: tuple(parameter.kinds) for name, parameter in reader.manifest.tensors.items()}
    return [
        Planned(piece.parameter.name, kind, piece.offsets, piece.sizes)
        for bucket in buckets.values()
        for piece in written(bucket, grid.coord(rank).pp, shard, replicas.index(rank), len(replicas))
        for kind in kinds[piece.parameter.name]
    ]


def _check_layout_alone(before: Job, job: Job) -> None:
    """Raise Refused where the jobs differ in more than the layout."""
    changed = [name for name in vars(job) if name not in OF_LAYOUT and getattr(job, name) != getattr(before, name)]
    if changed:
        reason = "resharding changes the layout alone; what else changes is for the training that resumes"
        raise Refused([Problem(name, "(changed)", reason, OF_LAYOUT) for name in changed])
