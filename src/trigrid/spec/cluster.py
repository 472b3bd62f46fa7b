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
    gpu: str = "h100"
    """The accelerator that is planned for, by its name in the catalogue."""
    nic_gbit: float = 0.0
    """Bandwidth of the NIC of one GPU, one way, in Gb/s; 0: what the catalogue says."""
    nvlink_gb_s: float = 0.0
    """Bandwidth of NVLink of one GPU, one way, in GB/s; 0: what the catalogue says."""
    oversubscription: float = 1.0
    """How many times less the spine carries than the leaves."""
    power_w: float = 0.0
    """Power that a GPU with its share of the server draws, in watts; 0: what the catalogue says."""
    pue: float = 1.25
    """Power of the building over that of the servers."""
    price: float = 0.0
    """Price of a GPU for one hour, in any currency; 0: no cost is told."""
    calibration: str = ""
    """A file of `trigrid calibrate`, whose measurements stand in for what the catalogue says; empty: none."""
    topology: str = ""
    """A file of the switches above the nodes, as Slurm's topology.conf, which orders the ranks; empty: what Slurm says
    of them, else the names of the nodes."""
