"""Where the groups of a layout sit on a cluster, without listing their ranks."""

from __future__ import annotations

from typing import NamedTuple

from trigrid.plan.machine import Machine
from trigrid.plan.network import Group, place
from trigrid.plan.setup import Setup
from trigrid.spec.cluster import Tier


class Groups(NamedTuple):
    """Where the groups of a layout sit."""

    tp: Group
    cp: Group
    zero: Group
    replicate: Group
    batch: Group
    ep: Group
    expert_zero: Group
    neighbours: Tier
    ends: Tier


def groups_of(setup: Setup, machine: Machine) -> Groups:
    """The groups of the first rank; experts are spread over cp first, then over the nearest of dp."""
    node, leaf = machine.gpus_per_node, machine.nodes_per_leaf
    stride = setup.strides()
    near = setup.dp // setup.dp_replicate

    def at(*axes: tuple[int, int]) -> Group:
        return place(tuple(sorted(axes, key=lambda axis: -axis[1])), node, leaf)

    def apart(distance: int) -> Tier:
        if distance % node == 0 or distance > node:
            return Tier.LEAF if distance < node * leaf else Tier.SPINE
        # Some neighbours share a node and some do not: the slowest decides.
        return Tier.NVLINK if setup.pp * distance <= node else Tier.LEAF

    experts_near = min(setup.ep, setup.cp)
    experts_far = max(1, setup.ep // experts_near)
    return Groups(
        tp=at((setup.tp, stride["tp"])),
        cp=at((setup.cp, stride["cp"])),
        zero=at((near, stride["dp"]), (setup.cp, stride["cp"])),
        replicate=at((setup.dp_replicate, stride["dp"] * near)),
        batch=at((setup.dp, stride["dp"]), (setup.cp, stride["cp"])),
        ep=at((experts_far, stride["dp"]), (experts_near, stride["cp"])),
        expert_zero=at((max(1, near // experts_far), stride["dp"] * experts_far)),
        neighbours=apart(stride["pp"]) if setup.pp > 1 else Tier.LOCAL,
        ends=apart(stride["pp"] * (setup.pp - 1)) if setup.pp > 1 else Tier.LOCAL,
    )
