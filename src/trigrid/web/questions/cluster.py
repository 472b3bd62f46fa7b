"""`cluster`: where the layout sits: networks, which axis crosses which, and what breaking a golden rule costs."""

from __future__ import annotations

from dataclasses import dataclass

from trigrid.grid import grid_of
from trigrid.plan.plan import Plan
from trigrid.plan.stages import step_of
from trigrid.report.plan import AXIS_OF_PART, tiers
from trigrid.report.units import seconds
from trigrid.spec.cluster import Tier
from trigrid.spec.layout import AXES
from trigrid.web.questions.draft import Draft, draft
from trigrid.web.questions.labels import AXES as NAMES
from trigrid.web.questions.limits import actions
from trigrid.web.questions.moved import with_value
from trigrid.web.questions.state import State

MOST_ACTIONS = 20_000
"""Of a schedule that is replayed for the price of a rule."""
PICTURED = 2
"""Nodes of a leaf, and leaves, that are drawn."""
INSIDE_OUT = ("pp", "dp", "cp", "tp")
"""Order of the ranks in which pipeline neighbours are farthest from each other."""


@dataclass(frozen=True, kw_only=True)
class ClusterInput:
    """Whose cluster."""

    state: State
    """The page's state."""


@dataclass(frozen=True, slots=True)
class Network:
    """A tier of the network."""

    name: str
    """NVLINK, LEAF or SPINE."""
    label: str
    """For people."""
    bandwidth_Bps: float
    """Of one GPU, one way, in bytes a second."""
    words: str
    """The same in a sentence."""


@dataclass(frozen=True, slots=True)
class AxisTier:
    """An axis of the layout on the network."""

    axis: str
    """tp, cp, ep, pp, dp or zero."""
    degree: int
    """Ranks in a group of it."""
    tier: str
    """The slowest that it crosses: LOCAL, NVLINK, LEAF or SPINE."""
    label: str
    """Its name for people."""
    traffic_bytes: float
    """Sent by one rank of the first stage in a step."""
    busy_s: float
    """Seconds of a step for which its wires are busy."""
    exposed_s: float
    """Seconds of them beside which nothing runs."""
    exposed_share: float
    """The same as a share of the step."""
    words: str
    """The same in a sentence."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A golden rule of the mapping of axes to networks."""

    code: str
    """Its name."""
    title: str
    """The rule."""
    holds: bool
    """Whether the layout keeps it."""
    words: str
    """What it costs, or would cost, in a sentence."""
    cost_s: float | None
    """Seconds of a step: against the way out where it is broken, of breaking it where it holds; null where that has no
    legal layout."""
    cost_share: float | None
    """The same as a share of the step."""
    state: State | None
    """The other layout: the way out where it is broken, the broken one where it holds."""


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU by its coordinates."""

    rank: int
    """Of the world."""
    dp: int
    """Data-parallel."""
    pp: int
    """Pipeline."""
    cp: int
    """Context-parallel."""
    tp: int
    """Tensor-parallel."""


@dataclass(frozen=True, slots=True)
class Node:
    """A server of the picture."""

    node: int
    """Its number."""
    leaf: int
    """The leaf switch above it."""
    gpus: list[Place]
    """Its GPUs."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A layout on its cluster."""

    gpus_per_node: int
    """In one NVLink domain."""
    nodes_per_leaf: int
    """Under one switch."""
    nodes: int
    """That the layout uses."""
    leaves: int
    """That those are under."""
    tiers: list[Network]
    """From the nearest to the farthest."""
    axes: list[AxisTier]
    """Those that are cut."""
    rules: list[Rule]
    """All of them."""
    sample: list[Node]
    """Some nodes: the first two of the first two leaves."""


def cluster(asked: ClusterInput) -> Picture:
    """Where the layout of a state sits. Raises Refused for one that is not legal."""
    drafted = draft(asked.state)
    plan = drafted.plan
    machine, world = plan.machine, plan.setup.world
    nodes = -(-world // machine.gpus_per_node)
    return Picture(
        gpus_per_node=machine.gpus_per_node,
        nodes_per_leaf=machine.nodes_per_leaf,
        nodes=nodes,
        leaves=-(-nodes // machine.nodes_per_leaf),
        tiers=_networks(plan),
        axes=_axes(plan),
        rules=[_tensor_rule(drafted, plan), _pipeline_rule(drafted, plan)],
        sample=_sample(plan),
    )


def _networks(plan: Plan) -> list[Network]:
    machine = plan.machine
    nvlink, nic, spine = machine.nvlink_Bps, machine.nic_Bps, machine.nic_Bps / machine.oversubscription
    node, leaf = machine.gpus_per_node, machine.nodes_per_leaf
    crowded = f", oversubscribed {machine.oversubscription:g}:1" if machine.oversubscription > 1 else ""
    rows = (
        (Tier.NVLINK, "NVLink", nvlink, f"{nvlink / 1e9:,.0f} GB/s one way among the {node} GPUs of a node"),
        (Tier.LEAF, "leaf", nic, f"{nic * 8 / 1e9:,.0f} Gb/s for each GPU among the {leaf} nodes of a leaf"),
        (Tier.SPINE, "spine", spine, f"{spine * 8 / 1e9:,.0f} Gb/s for each GPU beyond a leaf{crowded}"),
    )
    return [Network(tier.name, label, rate, words) for tier, label, rate, words in rows]


def _axes(plan: Plan) -> list[AxisTier]:
    setup, time, words = plan.setup, plan.time, tiers(plan)
    groups = step_of(plan.job, plan.software).groups(setup)
    rows = (
        ("tp", setup.tp, groups.tp.tier),
        ("cp", setup.cp, groups.cp.tier),
        ("ep", setup.ep, groups.ep.tier),
        ("pp", setup.pp, groups.neighbours),
        ("dp", setup.dp, groups.batch.tier if setup.dp > 1 else Tier.LOCAL),
        ("zero", setup.shards, groups.zero.tier),
    )
    found = []
    for axis, degree, tier in rows:
        if degree == 1:
            continue
        mine = [part for part in time.links_s if AXIS_OF_PART.get(part, part) == axis]
        busy, exposed = (sum(of.get(part, 0.0) for part in mine) for of in (time.links_s, time.parts_s))
        label = NAMES.get(axis, "data parallel")
        told = f"{label} {degree}: over {words.get(axis, 'no network')}"
        if busy:
            told += f", wires busy for {seconds(busy)} of the step, {seconds(exposed)} of it exposed"
        found.append(
            AxisTier(
                axis=axis,
                degree=degree,
                tier=tier.name,
                label=label,
                traffic_bytes=plan.traffic_bytes.get(axis, 0.0),
                busy_s=busy,
                exposed_s=exposed,
                exposed_share=exposed / time.step_s,
                words=told,
            )
        )
    return found


def _tensor_rule(drafted: Draft, plan: Plan) -> Rule:
    title = "Tensor parallelism stays inside the NVLink domain"
    node, tp = plan.machine.gpus_per_node, plan.setup.tp
    groups = step_of(plan.job, plan.software).groups(plan.setup)
    if groups.tp.tier > Tier.NVLINK:
        if plan.setup.order[-1] != "tp":
            state, other = with_value(drafted.state, "parallel.order", AXES), "with tp as the fastest axis"
        else:
            state, other = with_value(drafted.state, "parallel.tp", groups.tp.inside), f"with TP {groups.tp.inside}"
        return _broken("tp-crosses-nodes", title, plan, state, other, f"TP {tp} crosses nodes of {node} GPUs")
    state = with_value(drafted.state, "parallel.tp", 2 * node)
    return _kept("tp-crosses-nodes", title, plan, state, f"TP {tp} does", f"with TP {2 * node}, across two nodes,")


def _pipeline_rule(drafted: Draft, plan: Plan) -> Rule:
    title = "Only data parallelism crosses the spine"
    groups = step_of(plan.job, plan.software).groups(plan.setup)
    if plan.setup.pp > 1 and groups.neighbours > Tier.LEAF:
        state = with_value(drafted.state, "parallel.order", AXES)
        return _broken("pp-crosses-spine", title, plan, state, "with pp inside dp", "pipeline neighbours cross it")
    state = with_value(drafted.state, "parallel.order", INSIDE_OUT)
    return _kept("pp-crosses-spine", title, plan, state, "so it is", "with dp inside pp")


def _broken(code: str, title: str, plan: Plan, state: State, other: str, fault: str) -> Rule:
    step_s = _step_s(state)
    if step_s is None:
        return Rule(code, title, False, f"{fault}; no legal layout is near that does not", None, None, None)
    cost = plan.step_s.best - step_s
    words = f"{fault}: {other} the step takes {seconds(step_s)} in place of {seconds(plan.step_s.best)}"
    return Rule(code, title, False, words, cost, cost / plan.step_s.best, state)


def _kept(code: str, title: str, plan: Plan, state: State, fact: str, other: str) -> Rule:
    step_s = _step_s(state)
    if step_s is None:
        return Rule(code, title, True, fact, None, None, None)
    cost = step_s - plan.step_s.best
    words = f"{fact}; {other} the step would take {seconds(step_s)} ({cost / plan.step_s.best:+.1%})"
    return Rule(code, title, True, words, cost, cost / plan.step_s.best, state)


def _step_s(state: State) -> float | None:
    """Seconds of a step of a state; None where it is not legal, or has a schedule that is long to replay."""
    drafted = draft(state)
    if drafted.problems or actions(drafted.job) > MOST_ACTIONS:
        return None
    return drafted.plan.step_s.best


def _sample(plan: Plan) -> list[Node]:
    grid, machine = grid_of(plan.job), plan.machine
    size, leaf = machine.gpus_per_node, machine.nodes_per_leaf
    nodes = sorted({first * leaf + n for first in range(PICTURED) for n in range(min(PICTURED, leaf))})
    found = []
    for node in nodes:
        ranks = range(node * size, min((node + 1) * size, grid.world))
        if ranks:
            gpus = [Place(rank, *grid.coord(rank)) for rank in ranks]
            found.append(Node(node, node // leaf, gpus))
    return found
