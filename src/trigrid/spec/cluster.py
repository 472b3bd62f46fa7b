"""Where ranks sit: nodes, leaves and the spine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Tier(IntEnum):
    """The slowest network that a group of ranks crosses; larger is farther."""

    LOCAL = 0
    NVLINK = 1
    LEAF = 2
    SPINE = 3


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Consecutive ranks fill a node (one NVLink domain), consecutive nodes fill a leaf, leaves meet in the spine."""

    gpus_per_node: int = 8
    """Ranks in one NVLink domain."""
    nodes_per_leaf: int = 32
    """Nodes under one leaf switch."""
