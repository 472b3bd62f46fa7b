"""What a user may ask of a scheduler: the fields are flags of `trigrid launch`, and their docstrings its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may ask of a scheduler, whichever it is."""

    nodes: int | None = None
    """Nodes; by default as many as the ranks fill."""
    ranks_per_node: int | None = None
    """Ranks of a node, each with a GPU; by default cluster.gpus_per_node."""
    container: str | None = None
    """Image of a container that has trigrid: a name, or for Slurm a file."""
    mount: tuple[str, ...] = ()
    """SOURCE:TARGET or SOURCE:TARGET:ro for the container; in Kubernetes SOURCE is a claim, or a path of the host."""
    env: tuple[str, ...] = ()
    """NAME=VALUE, or NAME with the value that it has here."""
    python: str | None = None
    """Interpreter on the nodes; by default this one, in a container python3."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What a user may ask Slurm for."""

    partition: str | None = None
    """Partition; by default the site's own."""
    account: str | None = None
    """Account that pays."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features of the nodes."""
    reservation: str | None = None
    """Reservation to run in."""
    time: str | None = None
    """Longest time, such as 8:00:00 or 7-00."""
    switches: str | None = None
    """Leaf switches at most, such as 1, or 1@60:00 to wait an hour for that."""
    gpu_type: str | None = None
    """Kind of GPU, as the site calls it."""
    cpus_per_rank: int | None = None
    """Cores of each rank; by default a node's are shared by all of its ranks."""
    exclusive: bool = True
    """Take whole nodes, with all their memory."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """What runs the container: enroot by its pyxis plugin, or apptainer."""
    setup: tuple[str, ...] = ()
    """A line of shell before the ranks start, such as "module load cuda"."""
    sbatch: tuple[str, ...] = ()
    """Any other option of sbatch, as in --sbatch=--mail-type=END."""


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """What a user may ask Kubernetes for."""

    kind: Literal["trainjob", "jobset"] = "trainjob"
    """A TrainJob of Kubeflow's trainer, or a plain JobSet."""
    namespace: str | None = None
    """Namespace; by default kubectl's own."""
    queue: str | None = None
    """Local queue of Kueue."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    resource: tuple[str, ...] = ()
    """What else each pod takes, such as memory=900Gi or rdma/hca=8."""
