"""This process's place in a job, as torchrun or srun tell it through the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trigrid.errors import Problem, Refused


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
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
        job = _number(env, "SLURM_JOB_ID", "0")
        place = Place(
            rank=_number(env, "SLURM_PROCID"),
            world=_number(env, "SLURM_NTASKS"),
            local_rank=_number(env, "SLURM_LOCALID"),
            local_world=int(env.get("SLURM_NTASKS_PER_NODE", env["SLURM_NTASKS"]).split("(")[0]),
            address=env.get("MASTER_ADDR", first_host(hosts)),
            # Jobs that share a node must not share a port.
            port=_number(env, "MASTER_PORT", str(20_000 + job % 20_000)),
            launcher="srun",
        )
    else:
        return None
    if not 0 <= place.rank < place.world:
        raise Refused([Problem("RANK", place.rank, f"is not a rank of a world of {place.world}")])
    return place


def first_host(hosts: str) -> str:
    """The first host of a Slurm list such as `gpu[003-010,014],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?", hosts)
    if match is None:
        return "127.0.0.1"
    prefix, numbers = match.groups()
    return prefix + (re.split(r"[-,]", numbers)[0] if numbers else "")


def _number(env: Mapping[str, str], key: str, default: str | None = None) -> int:
    text = env.get(key, default)
    if text is None or not text.isdecimal():
        raise Refused([Problem(key, text, "the launcher's environment must give a whole number here")])
    return int(text)
