"""DCP's storage: boxes of global tensors in one safetensors file a rank, and a manifest in JSON.

DCP's own files are pickles, which run code when they are read; these are not.
"""

from __future__ import annotations

import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trigrid.checkpoint.files import opened, write_tensors, write_text
from trigrid.checkpoint.folder import aside, publish
from trigrid.checkpoint.manifest import (
    DTYPES,
    FORMATS,
    JOB,
    File,
    Manifest,
    State,
    Stored,
    StoredParameter,
    new_manifest,
    write_manifest,
)
from trigrid.checkpoint.parts import entry_name, key_of
from trigrid.errors import TrigridError

SPARE_BYTES = 64 << 20
"""Left free on the disk beside a checkpoint: for logs, and for what others write meanwhile."""


class FolderWriter(StorageWriter):
    """Writes the checkpoint `path` aside, and makes it visible at the very end.

    job_text: of its job.toml. The first rank says how many bytes it has once it is there.
    """

    def __init__(self, path: Path, state: State, job_text: str) -> None:
        self._path, self._state, self._job_text = path, state, job_text
        self._aside = aside(path)
        self.bytes = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is made once the plans are known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        needed = sum(item.tensor_storage_size() or 0 for plan in plans for item in plan.items)
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        free = shutil.disk_usage(self._aside).free
        if free < needed + SPARE_BYTES:
            self._aside.rmdir()
            raise OSError(f"{needed / 1e9:.3g} GB are needed in {self._path.parent}, and {free / 1e9:.3g} GB are free")
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if plan.items:
            tensors = {}
            for item in plan.items:
                values = planner.resolve_data(item)
                assert isinstance(values, Tensor)
                tensors[entry_name(item.index.fqn, item.index.offset or ())] = values
            written = write_tensors(self._aside / f"rank-{plan.storage_data:05d}.safetensors", tensors)
            results = [WriteResult(item.index, item.tensor_storage_size() or 0, written) for item in plan.items]
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors, files = describe(metadata, results)
        write_text(self._aside / JOB, self._job_text)
        write_manifest(self._aside, new_manifest(self._state, tensors, files, self._job_text))
        publish(self._path)
        self.bytes = sum(file.bytes for file in files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def describe(
    metadata: Metadata, results: list[list[WriteResult]]
) -> tuple[dict[str, StoredParameter], tuple[File, ...]]:
    """The manifest's account of what was written."""
    written = {result.index: result.storage_data for rank in results for result in rank}
    files = sorted(set(written.values()), key=lambda file: file.name)
    number = {file.name: i for i, file in enumerate(files)}
    tensors: dict[str, StoredParameter] = {}
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        kind, _, name = key.partition("/")
        parts = tuple(
            (number[written[MetadataIndex(key, chunk.offsets)].name], tuple(chunk.offsets), tuple(chunk.sizes))
            for chunk in tensor.chunks
        )
        parameter = tensors.setdefault(name, StoredParameter(tuple(tensor.size), {}))
        parameter.kinds[kind] = Stored(FORMATS[tensor.properties.dtype], parts)  # type: ignore[index]
    return tensors, tuple(files)


class FolderReader(StorageReader):
    """Reads from the folder of a checkpoint with this manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._files = {
            MetadataIndex(key_of(name, kind), offsets): manifest.files[number].name
            for name, kind, _, stored in manifest.stored()
            for number, offsets, _ in stored.parts
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                key_of(name, kind): TensorStorageMetadata(
                    TensorProperties(DTYPES[stored.dtype]),
                    torch.Size(parameter.shape),
                    [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for _, at, sizes in stored.parts],
                )
                for name, kind, parameter, stored in self._manifest.stored()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The manifest says all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._files[item.storage_index]].append(item)
        for name, items in by_file.items():
            with opened(self._folder / name) as file:
                for item in items:
                    box = file.get_slice(entry_name(item.storage_index.fqn, item.storage_index.offset or ()))
                    here = zip(item.storage_offsets, item.lengths, strict=True)
                    values = box[tuple(slice(offset, offset + length) for offset, length in here)]
                    planner.resolve_tensor(item).copy_(values)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@contextmanager
def among(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within, DCP says nothing of a world of one, which has no group and needs none."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def reasons(error: CheckpointException) -> str:
    """Which ranks failed, and why."""
    return "; ".join(f"rank {rank}: {_reason(cause)}" for rank, (cause, _) in sorted(error.failures.items()))


def _reason(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, OSError | TrigridError) else f"{type(cause).__name__}: {cause}"
