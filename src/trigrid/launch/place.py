"""This process's place in a job, as torchrun or srun tell it through the environment."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from trigrid.errors import Problem, Refused
from trigrid.launch.hosts import expand

RUN_DIR_VARIABLE = "_TRIGRID_RUN_DIR"
"""Set for the ranks that `trigrid train` itself starts: the folder of their run, where they also leave their errors."""
LAUNCH_VARIABLE = "_TRIGRID_LAUNCH"
"""Set by what `trigrid launch` writes: a name for the launch. Ranks that are started again under it go on with the same
run, to which a link of that name in `run.out` leads."""
MARKER = "preempted.json"
"""In the folder of a run that was told to stop: since when it can go on, and from where."""
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has started the ranks again."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The network interface on which processes of one machine meet."""


@dataclass(frozen=True)
class Place:
    """rank of world; local_rank of local_world on this node; where the first rank listens."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    launcher: str


def restarts_of(env: Mapping[str, str]) -> int:
    """How often torchrun has started the ranks again."""
    return _number(env, RESTARTS_VARIABLE, "0")


def launcher_of(env: Mapping[str, str]) -> str:
    """Who has started this process, the same for all of its attempts."""
    if launch := env.get(LAUNCH_VARIABLE):
        return launch
    run = env.get("TORCHELASTIC_RUN_ID", "none")
    return run if run not in ("", "none") else f"{socket.gethostname()}:{os.getppid()}"


def host_of(env: Mapping[str, str]) -> str:
    """The node of this process; Slurm says which it is, also where several share a machine."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def find_place(env: Mapping[str, str]) -> Place | None:
    """The place that `env` gives, or None where no launcher started this process."""
    if "RANK" in env and "WORLD_SIZE" in env:
        world = _number(env, "WORLD_SIZE")
        place = Place(
            rank=_number(env, "RANK"),
            world=world,
            local_rank=_number(env, "LOCAL_RANK", "0"),
            local_world=_number(env, "LOCAL_WORLD_SIZE", str(world)),
            address=env.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(env, "MASTER_PORT", "29500"),
            launcher="torchrun",
        )
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and env.get("SLURM_NTASKS", "1") != "1":
        # One task is a shell on a node, not a rank of a job.
        hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
        job = _number(env, "SLURM_JOB_ID", "0")
        place = Place(
            rank=_number(env, "SLURM_PROCID"),
            world=_number(env, "SLURM_NTASKS"),
            local_rank=_number(env, "SLURM_LOCALID"),
            local_world=tasks_of_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(env, "SLURM_NODEID", "0")),
            address=env.get("MASTER_ADDR") or first_host(hosts),
            port=_number(env, "MASTER_PORT", str(port_of(job))),
            launcher="srun",
        )
    else:
        return None
    if not 0 <= place.rank < place.world:
        raise Refused([Problem("RANK", place.rank, f"is not a rank of a world of {place.world}")])
    return place


def port_of(job: int) -> int:
    """A port for Slurm's job of this number: jobs that share a node must not share one, and the system gives those from
    32,768 on to whoever asks."""
    return 20_000 + job % 12_000


def first_host(hosts: str) -> str:
    """The first host of a Slurm list such as `gpu[003-010,014],login1`."""
    try:
        return next(iter(expand(hosts)), "127.0.0.1")
    except ValueError as error:
        raise Refused([Problem("SLURM_STEP_NODELIST", hosts, str(error))]) from None


def tasks_of_node(tasks: str, node: int) -> int:
    """Tasks on node number `node` of a Slurm list such as `8(x2),4`: eight on two nodes each, then four."""
    counts = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise Refused([Problem("SLURM_STEP_TASKS_PER_NODE", tasks, "is no list of tasks per node")])
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise Refused([Problem("SLURM_NODEID", node, f"SLURM_STEP_TASKS_PER_NODE = {tasks} has {len(counts)} nodes")])
    return counts[node]


def _number(env: Mapping[str, str], key: str, default: str | None = None) -> int:
    text = env.get(key, default)
    if text is None or not text.isdecimal():
        raise Refused([Problem(key, text, "the launcher's environment must give a whole number here")])
    return int(text)
