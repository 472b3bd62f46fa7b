"""DCP's plans: which boxes of global tensors a rank writes and reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
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
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trigrid.checkpoint.parts import Part


class PartsSaver(SavePlanner):
    """Plans to write what `parts` gives. It is called within the plan, where DCP tells every rank of an error of one:
    outside, the others would wait for a rank that has given up."""

    def __init__(self, parts: Callable[[], Sequence[Part]]) -> None:
        self._parts = parts
        self._values: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """The parts say all."""

    def create_local_plan(self) -> SavePlan:
        parts = self._parts()
        self._values = {MetadataIndex(part.key, part.offsets): part.values for part in parts}
        return SavePlan([_write_item(part) for part in parts])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            volume = sum(prod(chunk.sizes) for chunk in tensor.chunks)
            if volume != prod(tensor.size):
                raise AssertionError(f"{key}: {volume} of {prod(tensor.size)} elements would be written")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._values[write_item.index]


def _write_item(part: Part) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(part.offsets), part.values.shape)
    data = TensorWriteData(chunk, TensorProperties(part.values.dtype), torch.Size(part.shape))
    return WriteItem(MetadataIndex(part.key, part.offsets), WriteItemType.SHARD, tensor_data=data)


class PartsLoader(LoadPlanner):
    """Plans to read `parts`, in place."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._values = {MetadataIndex(part.key, part.offsets): part.values for part in parts}
        self._metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        wanted: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        for part in self._parts:
            wanted[part.key].append(ChunkStorageMetadata(torch.Size(part.offsets), part.values.shape))
        items: list[ReadItem] = []
        for key, chunks in wanted.items():
            stored = self._metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(key, stored, chunks)
            covered, needed = sum(prod(item.lengths) for item in found), sum(prod(chunk.sizes) for chunk in chunks)
            if covered != needed:
                raise AssertionError(f"{key}: {covered} of {needed} elements would be read")
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint of trigrid has tensors alone")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._values[read_item.dest_index]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """What is read is read in place."""
