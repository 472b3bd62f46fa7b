"""Seconds of collectives and messages, from where the ranks sit.

A group of n ranks with n_in in each NVLink domain: a ring moves B·(n − 1)/n bytes through every GPU's NVLink, and
B·(n − 1)/(n·n_in) through every NIC, for there are as many rings as a node has NICs in the group and each takes its
part; the slower of the two decides, and each step of the ring adds a latency. Beyond a leaf the spine divides the
bandwidth by its oversubscription. (Thakur 2005 for the ring; NCCL's hierarchy.)
Where a calibration has wires of a group's tier, these price it instead (plan/measured.py).
"""

from __future__ import annotations

from typing import NamedTuple

from trigrid.plan.machine import Machine
from trigrid.plan.measured import WireKind
from trigrid.spec.cluster import Tier


class Group(NamedTuple):
    """A group of ranks: how many, how many of them in one NVLink domain, how many domains, and the farthest tier."""

    size: int
    inside: int
    nodes: int
    tier: Tier


LOCAL = Group(1, 1, 1, Tier.LOCAL)


def place(axes: tuple[tuple[int, int], ...], gpus_per_node: int, nodes_per_leaf: int) -> Group:
    """The group of rank 0 that spans `axes`, (degree, stride) of each, fastest last.

    Equal to what grid.py finds by listing ranks, in time that does not grow with the slowest axis.
    """
    axes = tuple(axis for axis in axes if axis[0] > 1)
    size = 1
    for degree, _ in axes:
        size *= degree
    if size == 1:
        return LOCAL
    inside = max(1, _below(axes, gpus_per_node))
    last = sum((degree - 1) * stride for degree, stride in axes)
    if last < gpus_per_node:
        return Group(size, size, 1, Tier.NVLINK)
    tier = Tier.LEAF if last < gpus_per_node * nodes_per_leaf else Tier.SPINE
    return Group(size, inside, max(2, -(-size // inside)), tier)


def _below(axes: tuple[tuple[int, int], ...], limit: int) -> int:
    """How many ranks of the axes lie below `limit`."""
    if limit <= 0:
        return 0
    degree, stride = axes[0]
    if len(axes) == 1:
        return min(degree, -(-limit // stride))
    return sum(_below(axes[1:], limit - at * stride) for at in range(min(degree, -(-limit // stride))))


class Network:
    """Prices transfers on one machine."""

    def __init__(self, machine: Machine):
        values = machine.values
        self._nvlink, self._leaf = machine.nvlink, machine.nic
        self._spine = machine.nic / machine.oversubscription
        self._hop_nvlink, self._hop_nic = values["hop.nvlink_s"], values["hop.nic_s"]
        self._measured = machine.measured if machine.measured.wires else None

    def gather_s(self, payload_bytes: float, group: Group) -> float:
        """An all-gather that yields `payload_bytes` on each rank."""
        measured = self._by_wire("all_gather", payload_bytes, group)
        return self._ring_s(payload_bytes, group) if measured is None else measured

    def scatter_s(self, payload_bytes: float, group: Group) -> float:
        """A reduce-scatter that takes `payload_bytes` on each rank."""
        measured = self._by_wire("reduce_scatter", payload_bytes, group)
        return self._ring_s(payload_bytes, group) if measured is None else measured

    def _by_wire(self, kind: WireKind, payload_bytes: float, group: Group) -> float | None:
        """What the calibration says of it, if it has anything to say."""
        if self._measured is None or group.size == 1 or payload_bytes <= 0:
            return None
        inside = group.inside if group.nodes > 1 else 1
        return self._measured.seconds(kind, payload_bytes, group.size, inside, group.tier)

    def _ring_s(self, payload_bytes: float, group: Group) -> float:
        size, inside, nodes, tier = group
        if size == 1 or payload_bytes <= 0:
            return 0.0
        within = payload_bytes * (size - 1) / size / self._nvlink if inside > 1 else 0.0
        if nodes == 1:
            return within + (size - 1) * self._hop_nvlink
        nic = self._spine if tier is Tier.SPINE else self._leaf
        between = payload_bytes * (size - 1) / (size * inside) / nic
        return max(within, between) + (inside - 1) * self._hop_nvlink + (nodes - 1) * self._hop_nic

    def reduce_s(self, payload_bytes: float, group: Group) -> float:
        """An all-reduce: a reduce-scatter and an all-gather."""
        measured = self._by_wire("all_reduce", payload_bytes, group)
        return 2 * self._ring_s(payload_bytes, group) if measured is None else measured

    def exchange_s(self, payload_bytes: float, group: Group) -> float:
        """An all-to-all in which each rank sends `payload_bytes` in all: what stays inside the node is fast."""
        size, inside, nodes, tier = group
        if size == 1 or payload_bytes <= 0:
            return 0.0
        measured = self._by_wire("all_to_all", payload_bytes, group)
        if measured is not None:
            return measured
        within = payload_bytes * (inside - 1) / size / self._nvlink
        if nodes == 1:
            return within + self._hop_nvlink
        nic = self._spine if tier is Tier.SPINE else self._leaf
        return max(within, payload_bytes * (size - inside) / size / nic) + self._hop_nic

    def message_s(self, payload_bytes: float, tier: Tier) -> float:
        """A message from one rank to another, `tier` apart."""
        if tier is Tier.LOCAL or payload_bytes <= 0:
            return 0.0
        measured = self._by_wire("message", payload_bytes, Group(2, 1, 2, tier))
        if measured is not None:
            return measured
        if tier is Tier.NVLINK:
            return payload_bytes / self._nvlink + self._hop_nvlink
        return payload_bytes / (self._spine if tier is Tier.SPINE else self._leaf) + self._hop_nic
