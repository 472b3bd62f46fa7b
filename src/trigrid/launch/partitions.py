"""What Slurm's partitions allow, so that a job which would wait for ever is refused at once.

Slurm takes a job that is too long or too large for its partition, and lets it wait (PartitionTimeLimit), unless the
site sets EnforcePartLimits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from trigrid.errors import Problem
from trigrid.launch.options import Slurm
from trigrid.launch.shape import NODES, Shape

FORMAT = "%P|%l|%D|%G|%a"
QUESTION = ("sinfo", "--all", "--noheader", f"--format={FORMAT}")
MOST = 8


@dataclass(frozen=True)
class Nodes:
    """Nodes of one kind in a partition. limit: the longest time, as Slurm writes it; gpus: of each node, by type."""

    partition: str
    default: bool
    limit: str
    count: int
    gpus: dict[str, int]
    up: bool


def read_partitions(answer: str) -> list[Nodes]:
    """What `sinfo` answers to QUESTION."""
    found = []
    for line in answer.splitlines():
        name, limit, count, gres, state = line.strip().split("|")
        gpus = {kind: int(number) for kind, number in re.findall(r"gpu(?::([^:,(]+))?:(\d+)", gres)}
        found.append(Nodes(name.rstrip("*"), name.endswith("*"), limit, int(count), gpus, state == "up"))
    return found


def partition_problems(there: Sequence[Nodes], slurm: Slurm, shape: Shape, gpus: bool) -> Iterator[Problem]:
    """Why the job will not run in the partition it asks for (in none of them, where it asks for several), or in the
    default one."""
    names = list(dict.fromkeys(nodes.partition for nodes in there))
    key = "--partition"
    asked = slurm.partition or next((nodes.partition for nodes in there if nodes.default), None)
    if asked is None:
        yield Problem(key, "not given", "there is no default partition", tuple(names[:MOST]))
        return
    several = asked.split(",")
    for name in several:
        if name not in names:
            nearest = get_close_matches(name, names, n=3, cutoff=0.5) or names[:MOST]
            yield Problem(key, name, "there is no such partition", tuple(nearest))
            return
    found = [list(_problems_of(name, there, slurm, shape, gpus)) for name in several]
    if all(found):
        yield from found[0]


def _problems_of(asked: str, there: Sequence[Nodes], slurm: Slurm, shape: Shape, gpus: bool) -> Iterator[Problem]:
    key, mine = "--partition", [nodes for nodes in there if nodes.partition == asked]
    if not any(nodes.up for nodes in mine):
        up = tuple(dict.fromkeys(nodes.partition for nodes in there if nodes.up))
        yield Problem(key, asked, "is down", up[:MOST])
    limit, wanted = minutes(mine[0].limit), minutes(slurm.time)
    if limit is not None and wanted is not None and wanted > limit:
        yield Problem("--time", slurm.time, f"is longer than partition {asked} allows", (mine[0].limit,))
    fit = [nodes for nodes in mine if not gpus or _gpus(nodes, slurm.gpu_type) >= shape.per_node]
    if gpus and not fit:
        most = max(_gpus(nodes, slurm.gpu_type) for nodes in mine)
        kind = f"{slurm.gpu_type} " if slurm.gpu_type else ""
        others = tuple(
            dict.fromkeys(nodes.partition for nodes in there if _gpus(nodes, slurm.gpu_type) >= shape.per_node)
        )
        yield Problem(key, asked, f"its nodes have {most} {kind}GPUs at most, and {shape.per_node} are needed", others)
    elif sum(nodes.count for nodes in fit) < shape.nodes:
        count = sum(nodes.count for nodes in fit)
        yield Problem(NODES, shape.nodes, f"partition {asked} has {count} such nodes", (count,))


def _gpus(nodes: Nodes, kind: str | None) -> int:
    return max((count for name, count in nodes.gpus.items() if kind is None or name == kind), default=0)


def minutes(text: str | None) -> float | None:
    """A time of Slurm (minutes, minutes:seconds, hours:minutes:seconds, days-hours…), None where there is no limit."""
    if text is None or not re.fullmatch(r"[\d:-]+", text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, mins, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, mins, seconds = parts
    else:
        hours, mins, seconds = 0, parts[0], parts[1] if len(parts) > 1 else 0
    return int(days or 0) * 1440 + hours * 60 + mins + seconds / 60
